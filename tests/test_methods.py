"""Tests of the table of decoding methods."""

import dataclasses

import jax
import pytest

from m2r2_jax.decoding.speculative import Layout
from m2r2_jax.drafters.methods import EXACT_ROWS, METHODS, build_method
from m2r2_jax.serving.session import Session


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("exact", [False, True])
def test_every_method_builds_with_its_defaults(tiny_model, name, exact):
    method = build_method(name, tiny_model, exact=exact)
    assert method.name == name
    assert method.rows == (EXACT_ROWS if exact else 1)
    assert (method.drafter is None) == (name == "autoregressive")
    if method.drafter is not None:
        same = build_method(name, tiny_model, exact=exact).drafter
        assert hash(same) == hash(method.drafter) and same == method.drafter


def test_exact_methods_run_with_rows_that_do_not_depend_on_each_other(tiny_model):
    config = dataclasses.replace(tiny_model.config, products="fused_16")
    model = dataclasses.replace(tiny_model, config=config)
    for exact, products in [(False, "fused_16"), (True, "exact")]:
        method = build_method("m2r2", model, exact=exact)
        assert method.drafter.config.products == products
        assert Session(model, method).model.config.products == products


def test_settings_reach_the_drafter(tiny_model):
    drafter = build_method("early_exit", tiny_model, exit_layer=3, length=5).drafter
    assert drafter.layout == Layout.chain(5, start_layer=3)
    assert build_method("m2r2", tiny_model, length=2).drafter.length == 2
    assert build_method("prompt_lookup", tiny_model, length=4).drafter.layout.size == 5


def test_a_model_without_trained_accelerators_says_so(tiny_model):
    method = build_method("m2r2", tiny_model)
    assert "no accelerators are trained for tiny" in method.note
    assert method.trainable_parameters == 0


@pytest.mark.parametrize("storage", ["tiny_model", "tiny_stacked_model"])
def test_accelerators_are_stored_as_the_blocks_are(storage, request):
    model = request.getfixturevalue(storage)
    layers = build_method("early_exit", model).params["accelerators"]["layers"]
    assert isinstance(layers, tuple) == model.unrolled
    assert {leaf.dtype for leaf in jax.tree.leaves(layers)} == {jax.numpy.float32.dtype}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "medusa2",
            {},
            "unknown method 'medusa2'; choose from autoregressive, early_exit",
        ),
        ("autoregressive", {"length": 3}, "has no setting length; it has none"),
        ("prompt_lookup", {"rank": 3, "depth": 1}, "no setting depth, rank; it has le"),
        ("early_exit", {"exit_layer": 9}, r"exit layer 9 .* choose 1\.\.4"),
    ],
)
def test_mistakes_say_what_is_known(tiny_model, name, settings, message):
    with pytest.raises(ValueError, match=message):
        build_method(name, tiny_model, **settings)


@pytest.mark.parametrize("name", ["prompt_lookup", "m2r2", "random_draft"])
def test_draft_length_is_refused_before_any_work(tiny_model, name):
    session = Session(tiny_model, build_method(name, tiny_model, length=0))
    with pytest.raises(ValueError, match="draft length 0 must be at least 1"):
        session.plan([[1, 2]], 5)

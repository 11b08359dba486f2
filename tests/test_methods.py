"""Tests of the table of decoding methods."""

import jax
import pytest

from m2r2_jax.decoding.drafting import Layout
from m2r2_jax.drafters.methods import METHODS, build_method
from m2r2_jax.serving.session import Session


@pytest.mark.parametrize("name", METHODS)
def test_every_method_builds_with_its_defaults(tiny_model, name):
    method = build_method(name, tiny_model)
    assert method.name == name
    same = build_method(name, tiny_model).drafter
    assert hash(same) == hash(method.drafter) and same == method.drafter


def test_settings_reach_the_drafter(tiny_model):
    drafter = build_method("early_exit", tiny_model, exit_layer=3, length=5).drafter
    assert drafter.layout == Layout.chain(5) and drafter.start_layer == 3
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

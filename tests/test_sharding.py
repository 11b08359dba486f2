"""Tests of meshes and of the table of logical axes, on one device."""

import warnings

import jax
import numpy as np
import pytest
from conftest import SMOLLM2_135M, TINY
from jax.sharding import AbstractMesh, PartitionSpec

from m2r2_jax.models import sharding
from m2r2_jax.models.cache import init_cache
from m2r2_jax.models.sharding import RULES, make_mesh
from m2r2_jax.models.transformer import weight_specs

TWO_BY_FOUR = AbstractMesh((2, 4), ("data", "model"))


@pytest.mark.parametrize(
    "text", ["data:1", "model:1", "data:1,model:1", "data:1, model:1"]
)
def test_mesh_has_the_described_axes(text):
    mesh = make_mesh(text)
    assert dict(mesh.shape) == {
        part.split(":")[0].strip(): 1 for part in text.split(",")
    }
    assert mesh.size == 1


@pytest.mark.parametrize(
    "text", ["", "data", "data:", "data:0", "data:-1", "data:two", "rows:1", "2"]
)
def test_malformed_mesh_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"is not AXIS:SIZE .*'data', 'model'.*data:2"):
        make_mesh(text)


def test_mesh_axis_may_stand_once():
    with pytest.raises(ValueError, match="'data:1' .* at most once"):
        make_mesh("data:1,data:1")


def test_mesh_needs_that_many_devices():
    count = jax.device_count()
    message = f"needs {2 * (count + 1)} devices, this process has {count}"
    with pytest.raises(ValueError, match=message):
        make_mesh(f"data:{count + 1},model:2")


def test_every_axis_of_a_weight_has_a_rule():
    for tied in (TINY, SMOLLM2_135M):
        specs = jax.tree.leaves(weight_specs(tied))
        assert {axis for spec in specs for axis in spec.axes} <= RULES.keys()


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        (
            ("kv_heads", "group", "head", "width"),
            (8, 3, 4, 5),
            ("model",) + (None,) * 3,
        ),
        (("width", "hidden"), (6, 12), (None, "model")),
        (("batch", "slots"), (4, 3), ("data", None)),
        (("batch", "vocab"), (4, 8), ("data", "model")),
        (("width",), (6,), (None,)),
    ],
)
def test_rules_place_dimensions_on_mesh_axes(axes, shape, expected):
    spec = sharding.sharding(TWO_BY_FOUR, axes, shape).spec
    assert spec == PartitionSpec(*expected)


def test_axis_that_the_mesh_lacks_is_replicated():
    mesh = AbstractMesh((2,), ("data",))
    assert sharding.sharding(mesh, ("vocab", "width"), (8, 4)).spec == PartitionSpec(
        None, None
    )


def test_unknown_axis_is_refused():
    with pytest.raises(ValueError, match="'depth' has no rule"):
        sharding.sharding(TWO_BY_FOUR, ("width", "depth"), (8, 8))


def test_two_dimensions_on_one_mesh_axis_are_refused():
    with pytest.raises(ValueError, match="two dimensions on mesh axis 'model'"):
        sharding.sharding(TWO_BY_FOUR, ("hidden", "heads"), (8, 8))


def test_dimension_that_does_not_divide_is_replicated_with_a_warning():
    with pytest.warns(UserWarning, match="kv_heads of size 9 .* 'model' of size 4"):
        spec = sharding.sharding(TWO_BY_FOUR, ("kv_heads", "width"), (9, 8)).spec
    assert spec == PartitionSpec(None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharding.sharding(TWO_BY_FOUR, ("kv_heads", "width"), (8, 8))


def test_batch_fills_the_data_axis():
    assert sharding.batch_size(None) == 1
    assert sharding.batch_size(TWO_BY_FOUR) == 2
    assert sharding.batch_size(AbstractMesh((4,), ("model",))) == 1


def test_batch_major_arrays_are_spread_over_the_data_axis():
    tree = {"ids": np.zeros((4, 7)), "length": np.zeros(4)}
    specs = {
        name: sharding.sharding(TWO_BY_FOUR, sharding.batch_axes(leaf), leaf.shape).spec
        for name, leaf in tree.items()
    }
    assert specs == {
        "ids": PartitionSpec("data", None),
        "length": PartitionSpec("data"),
    }


@pytest.mark.parametrize("unrolled", [True, False])
def test_cache_is_spread_over_the_data_axis(unrolled):
    def create():
        return init_cache(TINY, 4, 16, np.float32, unrolled=unrolled)

    shardings = sharding.cache_shardings(TWO_BY_FOUR, jax.eval_shape(create))
    rows = PartitionSpec(*[None] * (not unrolled), "data", None, None)
    assert {s.spec for s in jax.tree.leaves((shardings.keys, shardings.values))} == {
        rows
    }
    assert shardings.length.spec == PartitionSpec("data")

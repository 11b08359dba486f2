"""Tests of the accelerated stream: I1, I2, and its maths against plain numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from conftest import TINY, TINY_DECODER, tiny_accelerators, tiny_params, unrolled

from m2r2_jax.models import multirate, transformer
from m2r2_jax.models.cache import init_cache

LENGTH, CAPACITY = 6, 16
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, LENGTH))
STATE = np.random.default_rng(1).normal(size=(2, LENGTH, TINY.width)).astype(np.float32)
STORAGES = pytest.mark.parametrize("storage", ["unrolled", "stacked"])
EXITS = range(1, TINY.num_layers + 1)


@functools.cache
def model(storage: str) -> dict:
    return unrolled(tiny_params()) if storage == "unrolled" else tiny_params()


@functools.cache
def initial_accelerators() -> dict:
    """As training starts from; the tree of an exit below is a slice of it."""
    config = multirate.MultiRateConfig(exit_layer=TINY.num_layers, rank=3)
    return multirate.init_accelerators(TINY, config, jax.random.key(0))


def stored(accelerators: dict, storage: str) -> dict:
    if storage == "stacked":
        return accelerators
    return {**accelerators, "layers": transformer.unroll(accelerators["layers"])}


def cut(accelerators: dict, exit_layer: int) -> dict:
    layers = jax.tree.map(lambda leaf: leaf[:exit_layer], accelerators["layers"])
    return {**accelerators, "layers": layers}


@functools.partial(jax.jit, static_argnames=("exit_layer", "cached"))
def run(params, accelerators, cache, *, exit_layer: int, cached: bool = True):
    """h[X], p[X] and the cache of `TOKENS`."""
    offset, causal = np.arange(LENGTH), np.tril(np.ones((LENGTH, LENGTH), bool))
    rows = transformer.cached_rows(TINY, cache, offset, causal)
    if not cached:
        mask = jnp.broadcast_to(causal, (2, LENGTH, LENGTH))
        rows = rows.replace(views=(rows.views[0].replace(mask=mask),))
    slow = transformer.embed(TINY, params, TOKENS)
    fast = multirate.start(accelerators, slow, STATE)
    return multirate.run_both(
        TINY_DECODER,
        params["blocks"],
        accelerators,
        slow,
        fast,
        rows,
        cache if cached else None,
        exit_layer,
    )


def new_cache(storage: str, fill: float = 0.0):
    """A cache of two rows that starts at different lengths when it holds something."""
    cache = init_cache(TINY, 2, CAPACITY, jnp.float32, unrolled=storage == "unrolled")
    if not fill:
        return cache
    keys, values = jax.tree.map(lambda x: x + fill, (cache.keys, cache.values))
    return cache.replace(keys=keys, values=values, length=jnp.array([3, 5]))


def assert_same_bits(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@STORAGES
@pytest.mark.parametrize("exit_layer", EXITS)
def test_i1_zero_accelerators_leave_both_streams_equal(storage, exit_layer):
    accelerators = stored(cut(initial_accelerators(), exit_layer), storage)
    slow, fast, _ = run(
        model(storage), accelerators, new_cache(storage, 0.5), exit_layer=exit_layer
    )
    assert np.std(slow) > 0.01
    np.testing.assert_array_equal(fast, slow)


@STORAGES
def test_i1_holds_without_a_cache(storage):
    accelerators = stored(initial_accelerators(), storage)
    slow, fast, cache = run(
        model(storage), accelerators, new_cache(storage), exit_layer=4, cached=False
    )
    assert cache is None
    np.testing.assert_array_equal(fast, slow)


@STORAGES
@pytest.mark.parametrize("value", [0.5, 50.0, np.nan], ids=["small", "large", "nan"])
def test_i2_accelerators_change_no_bit_of_slow_rows_and_cache(storage, value):
    def results(scale):
        accelerators = tiny_accelerators(3, scale=scale, carry=scale)
        return run(
            model(storage),
            stored(accelerators, storage),
            new_cache(storage, 0.5),
            exit_layer=3,
        )

    slow, fast, cache = results(0.0)
    other_slow, other_fast, other_cache = results(value)
    assert_same_bits(other_slow, slow)
    assert_same_bits(other_cache, cache)
    changed = np.any(np.asarray(other_fast) != np.asarray(fast), axis=-1)
    assert changed.all(), "every fast row must feel the accelerators"


@STORAGES
def test_i2_accelerated_stream_adds_nothing_to_the_cache(storage):
    before = new_cache(storage, 0.5)
    accelerators = stored(tiny_accelerators(3, scale=0.5, carry=0.5), storage)
    *_, after = run(model(storage), accelerators, before, exit_layer=3)
    for was, now in zip(
        (*before.keys, *before.values), (*after.keys, *after.values), strict=True
    ):
        was, now = (np.asarray(x).reshape(2, -1, CAPACITY, 16) for x in (was, now))
        for row, length in enumerate((3, 5)):
            np.testing.assert_array_equal(now[row, :, :length], was[row, :, :length])
            end = length + LENGTH
            np.testing.assert_array_equal(now[row, :, end:], was[row, :, end:])
    np.testing.assert_array_equal(after.length, before.length)
    assert not np.any(np.asarray(after.keys[3]) != np.asarray(before.keys[3]))
    assert np.all(
        np.asarray(after.keys[2])[:, 5:9] != np.asarray(before.keys[2])[:, 5:9]
    )


@STORAGES
@pytest.mark.parametrize("exit_layer", [1, 3])
def test_both_streams_equal_plain_numpy(storage, exit_layer):
    accelerators = tiny_accelerators(exit_layer, scale=0.3, carry=0.3)
    slow, fast, _ = run(
        model(storage),
        stored(accelerators, storage),
        new_cache(storage),
        exit_layer=exit_layer,
    )
    for row in range(2):
        expected = reference.both_streams(
            TINY, model("stacked"), accelerators, TOKENS[row], STATE[row], exit_layer
        )
        np.testing.assert_allclose(slow[row], expected[0], atol=1e-5)
        np.testing.assert_allclose(fast[row], expected[1], atol=1e-5)


@STORAGES
def test_slow_stream_is_the_model_without_accelerators(storage):
    accelerators = stored(tiny_accelerators(4, scale=0.5, carry=0.5), storage)
    slow, _, _ = run(model(storage), accelerators, new_cache(storage), exit_layer=4)
    normed = transformer.final_norm(TINY, model(storage), slow)
    logits = transformer.unembed(TINY_DECODER, model(storage), normed)
    expected = jax.jit(transformer.forward, static_argnums=0)(
        TINY_DECODER, model(storage), TOKENS
    )
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_initial_accelerators_have_the_documented_shapes():
    D, F, N, X, r = TINY.width, TINY.hidden_width, 4 * 16, 4, 3
    sizes = {"q": (D, N), "o": (N, D), "gate": (D, F), "up": (D, F), "down": (F, D)}
    accelerators = initial_accelerators()
    assert accelerators["layers"].keys() == sizes.keys()
    for name, (width_in, width_out) in sizes.items():
        pair = accelerators["layers"][name]
        assert pair["down"].shape == (X, width_in, r)
        assert pair["up"].shape == (X, r, width_out)
        assert not pair["up"].any()
        assert np.std(pair["down"]) == pytest.approx(width_in**-0.5, rel=0.15)
    assert accelerators["carry"].shape == (D, D)
    assert {m.shape for m in accelerators["exit"].values()} == {(1, D, D)}
    assert not any(
        m.any() for m in (accelerators["carry"], *accelerators["exit"].values())
    )


@pytest.mark.parametrize("exit_layer", [-1, 0, 5])
def test_exit_outside_the_model_is_refused(exit_layer):
    config = multirate.MultiRateConfig(exit_layer, rank=3)
    with pytest.raises(ValueError, match=rf"{exit_layer} .*4 layers.*1\.\.4"):
        multirate.init_accelerators(TINY, config, jax.random.key(0))


def test_rank_below_one_is_refused():
    config = multirate.MultiRateConfig(exit_layer=1, rank=0)
    with pytest.raises(ValueError, match="rank 0 must be at least 1"):
        multirate.init_accelerators(TINY, config, jax.random.key(0))

"""Tests of the key/value cache against a model of it in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY

from m2r2_jax.models.cache import KVCache, cache_layout, grow, init_cache

CAPACITY = 12
LAYERS, K, H = TINY.num_layers, TINY.num_kv_heads, TINY.head_dim
STORAGES = pytest.mark.parametrize("unrolled", [True, False], ids=["tuple", "stack"])
LENGTHS = pytest.mark.parametrize("lengths", [[3], [0, 5, 2]], ids=["one", "three"])


def random_cache(lengths: list[int], unrolled: bool) -> KVCache:
    """A cache whose every slot, scratch too, holds a number of its own."""
    cache = init_cache(TINY, len(lengths), CAPACITY, jnp.float32, unrolled=unrolled)
    rng = np.random.default_rng(0)
    keys, values = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype),
        (cache.keys, cache.values),
    )
    return KVCache(keys, values, jnp.array(lengths, jnp.int32))


def contents(cache: KVCache) -> np.ndarray:
    """Keys and values as `[2, L, B, K, S, H]`, whatever the storage."""
    both = np.stack([np.stack(cache.keys), np.stack(cache.values)])
    return both.reshape(2, LAYERS, len(cache.length), K, -1, H)


def new_rows(batch: int, count: int, seed: int = 1) -> np.ndarray:
    shape = (2, batch, count, K, H)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@STORAGES
@LENGTHS
@pytest.mark.parametrize("layer", [0, 2])
def test_append_writes_behind_each_rows_length(lengths, unrolled, layer):
    cache = random_cache(lengths, unrolled)
    expected = contents(cache)
    rows = new_rows(len(lengths), 4)
    for b, length in enumerate(lengths):
        for t in range(4):
            expected[:, layer, b, :, length + t] = rows[:, b, t]
    appended = jax.jit(KVCache.append, static_argnums=1 if unrolled else ())(
        cache, layer, *rows
    )
    np.testing.assert_array_equal(contents(appended), expected)
    np.testing.assert_array_equal(appended.length, lengths)


@STORAGES
@LENGTHS
def test_read_gives_one_layer_in_cache_layout(lengths, unrolled):
    cache = random_cache(lengths, unrolled)
    keys, values = cache.read(2)
    expected = contents(cache)[:, 2].reshape(2, -1, CAPACITY, H)
    np.testing.assert_array_equal(np.stack([keys, values]), expected)


@STORAGES
def test_advance_moves_lengths_and_nothing_else(unrolled):
    cache = random_cache([0, 5, 2], unrolled)
    advanced = cache.advance(jnp.array([4, 0, 1]))
    np.testing.assert_array_equal(advanced.length, [4, 5, 3])
    np.testing.assert_array_equal(contents(advanced), contents(cache))


@STORAGES
@LENGTHS
def test_commit_path_moves_the_accepted_rows_together(lengths, unrolled):
    cache = random_cache(lengths, unrolled)
    paths = np.array([[0, 2, 4, 0], [0, 1, 3, 0], [0, 3, 0, 0]])[: len(lengths)]
    expected = contents(cache)
    before = expected.copy()
    for b, length in enumerate(lengths):
        for to, source in enumerate(paths[b]):
            expected[:, :, b, :, length + to] = before[:, :, b, :, length + source]
    moved = jax.jit(KVCache.commit_path)(cache, paths)
    np.testing.assert_array_equal(contents(moved), expected)
    np.testing.assert_array_equal(moved.length, lengths)


@STORAGES
@LENGTHS
def test_grow_keeps_contents_and_adds_empty_slots(lengths, unrolled):
    cache = random_cache(lengths, unrolled)
    grown = grow(cache, 20)
    assert (cache.capacity, grown.capacity) == (12, 20)
    np.testing.assert_array_equal(contents(grown)[..., :12, :], contents(cache))
    assert not contents(grown)[..., 12:, :].any()
    np.testing.assert_array_equal(grown.length, lengths)


def test_grow_never_shrinks_nor_copies_without_need():
    cache = random_cache([3], True)
    assert grow(cache, CAPACITY) is cache
    assert grow(cache, 4) is cache


@STORAGES
def test_new_cache_is_empty(unrolled):
    cache = init_cache(TINY, 3, CAPACITY, jnp.bfloat16, unrolled=unrolled)
    assert not contents(cache).any()
    np.testing.assert_array_equal(cache.length, [0, 0, 0])
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((cache.keys, cache.values))}
    assert dtypes == {jnp.dtype(jnp.bfloat16)}


def test_cache_layout_puts_heads_of_a_row_together():
    rows = new_rows(3, 4)[0]
    laid_out = cache_layout(jnp.asarray(rows))
    for b, kv_head in np.ndindex(3, K):
        np.testing.assert_array_equal(laid_out[b * K + kv_head], rows[b, :, kv_head])


@STORAGES
def test_append_in_a_donated_loop_allocates_no_second_cache(unrolled):
    """The cache is updated in place: the loop's scratch stays below one buffer."""
    cache = init_cache(TINY, 1, 4096, jnp.float32, unrolled=unrolled)
    rows = jnp.ones((1, 1, K, H))

    def step(_, cache):
        for layer in range(LAYERS):
            cache = cache.append(layer, rows, rows)
        return cache.advance(jnp.array([1]))

    loop = jax.jit(lambda cache: jax.lax.fori_loop(0, 9, step, cache), donate_argnums=0)
    memory = loop.lower(cache).compile().memory_analysis()
    one_buffer = 4096 * K * H * 4
    assert memory.alias_size_in_bytes >= 2 * LAYERS * one_buffer
    assert memory.temp_size_in_bytes < one_buffer

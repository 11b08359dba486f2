"""Tests of the decoder: parameter tree, masks, and its two storages and two paths."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from conftest import SMOLLM2_135M, TINY, TINY_DECODER, tiny_params, unrolled

from m2r2_jax.decoding import passes
from m2r2_jax.decoding.drafting import Layout
from m2r2_jax.models import transformer
from m2r2_jax.models.cache import KVCache, init_cache
from m2r2_jax.models.config import Decoder

TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, 12))
forward = jax.jit(transformer.forward, static_argnums=0)
score = jax.jit(passes.score, static_argnums=0)


@pytest.fixture(scope="module")
def params() -> dict:
    return tiny_params()


@pytest.mark.parametrize(
    ("kv_heads", "tied"), [(1, True), (2, False), (2, True), (4, False)]
)
def test_forward_equals_plain_numpy(kv_heads, tied):
    config = dataclasses.replace(TINY, tied_head=tied, num_kv_heads=kv_heads)
    params = tiny_params(config, seed=kv_heads)
    result = forward(Decoder(config), params, TOKENS)
    assert result.dtype == jnp.float32
    for row, tokens in enumerate(TOKENS):
        expected = reference.logits(config, params, tokens)
        np.testing.assert_allclose(result[row], expected, atol=1e-5)


def test_scanned_equals_unrolled(params):
    scanned = forward(TINY_DECODER, params, TOKENS)
    np.testing.assert_allclose(
        forward(TINY_DECODER, unrolled(params), TOKENS), scanned, atol=1e-5
    )


def test_flax_module_applies_the_same_function(params):
    applied = transformer.Transformer(TINY).apply({"params": params}, TOKENS)
    np.testing.assert_allclose(
        applied, forward(TINY_DECODER, params, TOKENS), atol=1e-5
    )


@pytest.mark.parametrize("tied", [True, False])
def test_init_makes_the_tree_of_the_weight_specs(tied):
    config = dataclasses.replace(TINY, tied_head=tied)
    specs = transformer.weight_specs(config)
    init = functools.partial(transformer.init_params, config)
    params = jax.eval_shape(init, jax.random.key(0))
    assert params.keys() == specs.keys()
    assert ("head" in params) == (not tied)
    for name, spec in specs["blocks"].items():
        assert params["blocks"][name].shape == (config.num_layers, *spec.shape)
    for name in specs.keys() - {"blocks"}:
        assert params[name].shape == specs[name].shape
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_initial_weights_are_small_and_norms_one():
    specs = transformer.weight_specs(TINY)
    key = jax.random.key(0)
    np.testing.assert_array_equal(specs["final_norm"].init(key, (48,)), np.ones(48))
    for spec in (specs["embed"], specs["blocks"]["down"]):
        assert np.std(spec.init(key, (48, 96))) == pytest.approx(0.02, rel=0.05)


def test_every_weight_has_a_name_for_each_axis():
    specs = jax.tree.leaves(transformer.weight_specs(TINY))
    assert len(specs) == 9
    assert all(len(spec.axes) == len(spec.shape) for spec in specs)


def test_full_size_model_has_135_million_parameters():
    shapes = jax.eval_shape(
        functools.partial(transformer.init_params, SMOLLM2_135M), jax.random.key(0)
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert count == 134_515_008


def test_unroll_keeps_every_layer(params):
    layers = transformer.unroll(params["blocks"])
    assert len(layers) == TINY.num_layers
    for index, weights in enumerate(layers):
        for name, stack in params["blocks"].items():
            np.testing.assert_array_equal(weights[name], stack[index])
            same = transformer.layer_weights(params["blocks"], index)[name]
            np.testing.assert_array_equal(weights[name], same)
    assert transformer.layer_weights(layers, 1) is layers[1]


def test_logits_have_no_gradient_to_later_tokens(params):
    tokens = np.arange(12)[None]

    def total(embedding, position):
        logits = transformer.forward(
            TINY_DECODER, {**params, "embed": embedding}, tokens
        )
        return jnp.sum(logits[0, position] * jnp.arange(TINY.vocab_size))

    gradient = jax.jit(jax.grad(total))
    for position in (0, 5, 11):
        reached = np.abs(gradient(params["embed"], position)).sum(axis=-1)
        assert (reached[: position + 1] > 0).all()
        assert (reached[position + 1 :] == 0).all()


def in_chunks(params: dict, sizes: tuple[int, ...]) -> np.ndarray:
    """Logits of `TOKENS`, prefilled in chunks of the given sizes."""
    stored = isinstance(params["blocks"], tuple)
    cache = init_cache(TINY, len(TOKENS), 16, jnp.float32, unrolled=stored)
    parts, position = [], 0
    for size in sizes:
        tokens = TOKENS[:, position : position + size]
        causal = np.tril(np.ones((size, size), bool))
        _, logits, cache = score(
            TINY_DECODER, params, cache, tokens, np.arange(size), causal
        )
        cache = cache.advance(jnp.full(len(TOKENS), size))
        parts.append(logits)
        position += size
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("storage", [unrolled, dict], ids=["unrolled", "stacked"])
@pytest.mark.parametrize("sizes", [(12,), (7, 5), (1,) * 12, (5, 1, 1, 5)])
def test_cached_equals_uncached_for_any_split(params, sizes, storage):
    expected = forward(TINY_DECODER, params, TOKENS)
    np.testing.assert_allclose(in_chunks(storage(params), sizes), expected, atol=1e-5)


def test_layers_may_be_run_in_two_goes(params):
    causal = np.tril(np.ones((12, 12), bool))
    rows = (TOKENS, np.arange(12), causal)
    cache = init_cache(TINY, 2, 16, jnp.float32, unrolled=False)
    whole, expected, filled = score(TINY_DECODER, params, cache, *rows)
    early = jax.jit(run_early, static_argnums=0)
    x_BRD, half = early(TINY_DECODER, params, cache, TOKENS, causal)
    later = jax.jit(functools.partial(passes.score, TINY_DECODER, start_layer=2))
    hidden, logits, joined = later(params, half, *rows, x_BRD)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    np.testing.assert_allclose(hidden, whole, atol=1e-5)
    np.testing.assert_allclose(joined.keys, filled.keys, atol=1e-5)
    assert not np.any(half.keys[2:]), "layers from 2 on must not have been written"


def run_early(decoder, params, cache: KVCache, tokens, causal):
    rows = transformer.cached_rows(decoder.config, cache, np.arange(12), causal)
    x_BRD = transformer.embed(decoder.config, params, tokens)
    return transformer.run_layers(decoder, params["blocks"], x_BRD, rows, cache, 0, 2)


def rows_of(layout: Layout, lengths: list[int]) -> transformer.Rows:
    cache = init_cache(TINY, len(lengths), 8, jnp.float32, unrolled=True)
    cache = cache.replace(length=jnp.array(lengths))
    return transformer.cached_rows(TINY, cache, layout.offset, layout.mask)


def written_out(*rows: str) -> np.ndarray:
    return np.array([[slot == "x" for slot in row] for row in rows])


def test_mask_of_a_chain_written_out():
    rows = rows_of(Layout.chain(2), [3, 0])
    expected_3 = written_out(
        "xxxx....",  #
        "xxxxx...",
        "xxxxxx..",
    )
    expected_0 = written_out(
        "x.......",  #
        "xx......",
        "xxx.....",
    )
    np.testing.assert_array_equal(
        rows.views[0].mask, np.stack([expected_3, expected_0])
    )
    assert rows.slow == 3


def test_mask_and_positions_of_a_tree_written_out():
    # The root has two children, rows 1 and 2; rows 3 and 4 hang on them.
    rows = rows_of(Layout((-1, 0, 0, 1, 2)), [2])
    expected = written_out(
        "xxx.....",
        "xxxx....",
        "xxx.x...",
        "xxxx.x..",
        "xxx.x.x.",
    )
    np.testing.assert_array_equal(rows.views[0].mask[0], expected)
    cos, sin = (turn[0, :, 0] for turn in rows.views[0].turns)
    # The first pair turns by one radian a position.
    positions = np.arctan2(sin, cos) % (2 * np.pi)
    np.testing.assert_allclose(positions, [2, 3, 3, 4, 4], rtol=1e-5)


def test_fast_rows_see_what_their_slow_twins_see():
    slow = rows_of(Layout.chain(2), [3, 0])
    both = transformer.with_fast_rows(slow)
    assert both.slow == 3
    (both,), (slow,) = both.views, slow.views
    for twin in (both.mask[:, :3], both.mask[:, 3:]):
        np.testing.assert_array_equal(twin, slow.mask)
    for both_turns, slow_turns in zip(both.turns, slow.turns, strict=True):
        np.testing.assert_array_equal(both_turns[:, 3:], slow_turns)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_kv_heads": 3}, "4 query heads cannot share 3"), ({"head_dim": 15}, "15")],
)
def test_impossible_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)

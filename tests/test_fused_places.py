"""A block through the fused kernels is the block through XLA's products."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, run_one, tiny_accelerators, tiny_chain, tiny_params

from m2r2_jax.models import multirate, transformer
from m2r2_jax.models.cache import init_cache
from m2r2_jax.models.config import Decoder
from m2r2_jax.models.fused_places import FusedPlaces
from m2r2_jax.ops.execution import Execution

LAYERS = 2
COMMITTED = np.array([5, 2])
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, 3))


def both_streams(kernels: str | None):
    """h and p of three rows of two sequences behind ragged caches, and the cache."""
    decoder = Decoder(TINY, Execution(kernels=kernels))
    params, accelerators = tiny_params(), tiny_accelerators(LAYERS, scale=0.3, carry=0)
    cache = init_cache(TINY, 2, 16, jnp.float32, unrolled=False)
    filled = np.random.default_rng(1).normal(size=cache.keys.shape)
    cache = cache.replace(
        keys=jnp.float32(filled), values=jnp.float32(-filled), length=COMMITTED
    )
    rows = transformer.cached_rows(TINY, cache, np.arange(3), np.tri(3, dtype=bool))
    slow = transformer.embed(TINY, params, TOKENS)
    fast = jnp.flip(slow, axis=0)
    call = jax.jit(multirate.run_both, static_argnums=(0, 7))
    blocks = params["blocks"]
    return call(decoder, blocks, accelerators, slow, fast, rows, cache, LAYERS)


@pytest.fixture(scope="module")
def expected():
    return both_streams(None)


@pytest.mark.parametrize("kernels", ["reference", "interpret"])
def test_both_streams_are_those_of_xla(expected, kernels):
    slow, fast, cache = both_streams(kernels)
    assert np.abs(expected[0] - expected[1]).max() > 0.1
    np.testing.assert_allclose(slow, expected[0], atol=2e-5)
    np.testing.assert_allclose(fast, expected[1], atol=2e-5)
    np.testing.assert_allclose(cache.keys, expected[2].keys, atol=2e-5)
    np.testing.assert_allclose(cache.values, expected[2].values, atol=2e-5)


def test_drafting_with_kernels_gives_the_same_text(tiny_model):
    prompt = [5, 17, 42]
    model = dataclasses.replace(tiny_model, execution=Execution(kernels="reference"))
    found = run_one(model, tiny_chain(), prompt, 24)
    plain = run_one(tiny_model, tiny_chain(), prompt, 24)
    assert found.token_ids == plain.token_ids
    assert found.accepted == plain.accepted


@pytest.mark.parametrize(
    ("change", "rows", "served"),
    [
        ({}, 2, True),
        ({}, 128, True),
        ({}, 1, False),
        ({}, 129, False),
        ({"activation": "gelu_tanh"}, 2, False),
        ({"biases": ("qkv",)}, 2, False),
        ({"residual_multiplier": 0.5}, 2, False),
    ],
)
def test_what_kernels_serve_is_a_rule(change, rows, served):
    decoder = Decoder(dataclasses.replace(TINY, **change))
    weights = tiny_params()["blocks"]
    assert FusedPlaces.serves(decoder, weights, rows) == served
    assert not FusedPlaces.serves(decoder, {**weights, "mlp_out_norm": 1}, rows)


def test_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match="kernels 'cuda' are unknown; choose from"):
        Execution(kernels="cuda")

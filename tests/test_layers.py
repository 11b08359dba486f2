"""Tests of the maths of a block against plain numpy in f64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from m2r2_jax.models import layers, rotary
from m2r2_jax.ops.execution import EXACT, PLAIN, Execution

FUSED_16 = Execution("fused", 16)
attention = jax.jit(layers.attention, static_argnames="execution")
rms_norm = jax.jit(layers.rms_norm, static_argnums=2)


@functools.partial(jax.jit, static_argnums=2)
def rotate(x_BRKGH, positions_BR, theta: float):
    """Turns and rotation together, as a block uses them."""
    rope = rotary.Rope(theta, x_BRKGH.shape[-1], 8192)
    return rotary.rotate(x_BRKGH, rotary.rotary_turns(positions_BR, rope))


def normal(seed: int, *shape: int, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def test_rms_norm_equals_numpy():
    x, scale = normal(0, 3, 4, 48) * 10, normal(1, 48)
    expected = reference.rms_norm(np.float64(x), np.float64(scale), 1e-5)
    np.testing.assert_allclose(rms_norm(x, scale, 1e-5), expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_of_a_zero_row_is_zero():
    result = rms_norm(jnp.zeros((1, 8)), jnp.ones(8), 1e-5)
    np.testing.assert_array_equal(result, np.zeros((1, 8)))


def test_rms_norm_computes_in_f32_for_bf16_rows():
    x = jnp.asarray(normal(0, 64) * 100, jnp.bfloat16)
    scale = jnp.ones(64, jnp.bfloat16)
    result = rms_norm(x, scale, 1e-5)
    exact = reference.rms_norm(np.float64(x), np.ones(64), 1e-5)
    assert result.dtype == jnp.bfloat16
    rounded = jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16)
    np.testing.assert_array_equal(result, rounded)


@pytest.mark.parametrize("context_length", [1, 255, 256, 257, 8192])
def test_turns_are_those_of_position_over_theta_to_the_pair(context_length):
    """At every position of the context, to the last bits of f32."""
    positions = jnp.arange(context_length)[None]
    cos, sin = rotary.rotary_turns(positions, rotary.Rope(100.0, 8, context_length))
    exponents = np.array([0, 0.25, 0.5, 0.75])
    angles = np.arange(context_length)[:, None] * 100.0**-exponents
    assert cos.shape == sin.shape == (1, context_length, 4)
    np.testing.assert_allclose(cos[0], np.cos(angles), atol=2e-7)
    np.testing.assert_allclose(sin[0], np.sin(angles), atol=2e-7)


def test_rotate_turns_pairs_half_a_head_apart():
    x = normal(0, 1, 5, 2, 3, 16)
    positions = np.array([0, 1, 2, 50, 4000])
    result = np.asarray(rotate(x, positions[None], 1e5))
    for kv_head in range(2):
        for group in range(3):
            expected = reference.rotate(
                np.float64(x[0, :, kv_head, group]), positions, 1e5
            )
            found = result[0, :, kv_head, group]
            np.testing.assert_allclose(found, expected, atol=2e-6)


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = normal(0, 16), normal(1, 16)

    def score(query_position, key_position):
        positions = np.array([[query_position, key_position]])
        rows = np.stack([q, k])[None, :, None, None]
        turned = np.asarray(rotate(rows, positions, 1e4))[0, :, 0, 0]
        return float(turned[0] @ turned[1])

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-5)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


def attention_case(batch=2, rows=3, kv_heads=2, group=2, slots=6, head=4):
    q = normal(0, batch, rows, kv_heads, group, head)
    k, v = (
        normal(1, batch * kv_heads, slots, head),
        normal(2, batch * kv_heads, slots, head),
    )
    mask = np.random.default_rng(3).random((batch, rows, slots)) < 0.5
    mask[..., 0] = True
    return q, k, v, mask


@pytest.mark.parametrize("execution", [PLAIN, FUSED_16, EXACT])
@pytest.mark.parametrize("group", [1, 3, 5])
def test_attention_equals_numpy_head_by_head(group, execution):
    q, k, v, mask = attention_case(group=group)
    result = attention(q, k, v, mask, execution=execution)
    result = np.asarray(result).reshape(2, 3, 2, group, 4)
    for b, kv_head, g in np.ndindex(2, 2, group):
        j = b * 2 + kv_head
        expected = reference.attend(
            *map(np.float64, (q[b, :, kv_head, g], k[j], v[j])), mask[b]
        )
        np.testing.assert_allclose(result[b, :, kv_head, g], expected, atol=1e-6)


@pytest.mark.parametrize("execution", [PLAIN, FUSED_16, EXACT])
def test_attention_ignores_what_masked_slots_hold(execution):
    q, k, v, mask = attention_case()
    mask[..., -2:] = False
    clean = attention(q, k, v, mask, execution=execution)
    k[:, -2:], v[:, -2:] = 1e4, -1e4
    again = attention(q, k, v, mask, execution=execution)
    np.testing.assert_array_equal(again, clean)


def test_gated_product_is_silu_of_the_first_half_times_the_second():
    gate_up = normal(0, 3, 2, 5)
    expected = reference.silu(np.float64(gate_up[:, 0])) * gate_up[:, 1]
    np.testing.assert_allclose(layers.gated_product(gate_up), expected, rtol=1e-5)


def test_softmax_is_f32_for_bf16_queries():
    """Scores of bf16 rows are summed and normalised in f32: a row of ones stays one."""
    slots = 1000
    q = jnp.ones((1, 1, 1, 1, 4), jnp.bfloat16)
    k = jnp.ones((1, slots, 4), jnp.bfloat16)
    v = jnp.ones((1, slots, 4), jnp.bfloat16)
    out = attention(q, k, v, jnp.ones((1, 1, slots), bool))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(out), 1.0, rtol=2**-7)


@pytest.mark.parametrize("size", [512, 1024, 48, 300, 7])
def test_argmax_is_the_first_of_the_largest(size):
    x = np.random.default_rng(0).integers(0, 50, (40, 3, size)).astype(np.float32)
    x[0] = -np.inf
    x[1, :, size // 2] = np.inf
    x[2, :, size - 1] = np.nan
    x[3, :, [size // 3, size // 2]] = np.nan
    found = jax.jit(layers.argmax)(x)
    np.testing.assert_array_equal(found, np.argmax(x, axis=-1))

"""The maths of a transformer block as free functions on arrays.

Legend of the letters in variable names, here and in every other module:
  B batch            D model width      N query heads          V vocabulary
  T new tokens       F hidden width     K key/value heads      L layers
  R rows (T slow,    H head width       G queries per kv head  J = B * K
    then fast rows)  S cache slots      n rows of a draft layout
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from m2r2_jax.ops.execution import PLAIN, Execution
from m2r2_jax.ops.products import fused_scores

# Norms, softmax and rotary angles are computed in f32 whatever the weights' dtype:
# their sums and the angles of late positions lose too many bits in bf16.

# Up to so many queries a head, transposing the scores is cheaper than the keys.
_FEW_QUERIES = 64
# Values that an arg-max compares at once, and how few are not worth it.
_GROUP, _LEAST_GROUP = 256, 16

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Root-mean-square normalisation over the axes of the scale, in f32 inside."""
    x_f32 = x.astype(jnp.float32)
    axes = tuple(range(-scale.ndim, 0))
    mean_square = jnp.mean(jnp.square(x_f32), axis=axes, keepdims=True)
    normalised = x_f32 * lax.rsqrt(mean_square + epsilon)
    return (normalised * scale.astype(jnp.float32)).astype(x.dtype)


def attention(
    q_BRKGH: jax.Array,
    keys_JSH: jax.Array,
    values_JSH: jax.Array,
    mask_BRS: jax.Array,
    execution: Execution = PLAIN,
    scale: float | None = None,
    cap: float | None = None,
) -> jax.Array:
    """Grouped-query attention of R rows over S slots.

    Args:
      q_BRKGH: queries, grouped by the key/value head they read.
      keys_JSH: keys in cache layout: both products then run without a transpose.
      values_JSH: values, same layout.
      mask_BRS: True where a row may read a slot; every row reads at least one.
      execution: how scores are computed here.
      scale: what scores are multiplied by; `H**-0.5` by default.
      cap: the largest score, see `soft_cap`.

    Returns:
      `[B, R, K*G*H]`.
    """
    B, R, K, G, H = q_BRKGH.shape
    q_JrH = q_BRKGH.swapaxes(1, 2).reshape(B * K, R * G, H)
    batch = ((0,), (0,))
    scores_JrS = _scores(q_JrH, keys_JSH, execution)
    scale = H**-0.5 if scale is None else scale
    scores_BKRGS = soft_cap(scores_JrS.reshape(B, K, R, G, -1) * scale, cap)
    # A finite floor: a slot that is not written yet can never make a NaN.
    floor = jnp.finfo(jnp.float32).min
    masked = jnp.where(mask_BRS[:, None, :, None], scores_BKRGS, floor)
    weights_JrS = jax.nn.softmax(masked, axis=-1).reshape(scores_JrS.shape)
    out_JrH = lax.dot_general(
        weights_JrS.astype(values_JSH.dtype), values_JSH, (((2,), (1,)), batch)
    )
    return out_JrH.reshape(B, K, R, G * H).swapaxes(1, 2).reshape(B, R, K * G * H)


def _scores(q_JrH: jax.Array, keys_JSH: jax.Array, execution: Execution) -> jax.Array:
    """Products of queries and keys, f32: `[J, r, S]`."""
    batch, queries = ((0,), (0,)), q_JrH.shape[1]
    if execution.has_registers(queries):
        return fused_scores(q_JrH, keys_JSH)
    few = queries <= _FEW_QUERIES
    left, right = (keys_JSH, q_JrH) if few else (q_JrH, keys_JSH)
    scores = lax.dot_general(
        left, right, (((2,), (2,)), batch), preferred_element_type=jnp.float32
    )
    # XLA would turn the product back to where its output needs no transpose, and with
    # it transpose the keys: three times the time of a decoding step's scores.
    return lax.optimization_barrier(scores).swapaxes(1, 2) if few else scores


def argmax(x: jax.Array) -> jax.Array:
    """Index of the first largest value in the last axis, `int32`.

    Of groups first and then inside the best one.

    XLA's CPU backend compares value and index one by one, but vectorises a maximum:
    over a vocabulary this takes a fifth of the time. Its maximum drops NaNs, which
    count as infinite here: the first of either is taken.
    """
    group = math.gcd(x.shape[-1], _GROUP)
    if group < _LEAST_GROUP:
        return _first_largest(x)
    groups = x.reshape(*x.shape[:-1], -1, group)
    largest = jnp.max(jnp.where(jnp.isnan(groups), jnp.inf, groups), axis=-1)
    best = _first_largest(largest)
    inside = jnp.take_along_axis(groups, best[..., None, None], axis=-2)[..., 0, :]
    return best * group + _first_largest(inside)


def _first_largest(x: jax.Array) -> jax.Array:
    """`jnp.argmax`, whose index would be `int64` where JAX runs in 64 bits."""
    return lax.argmax(x, x.ndim - 1, jnp.int32)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """Bends values smoothly into -cap..cap (Gemma 2); None leaves them."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def gated_product(gate_up: jax.Array, activation: str = "silu") -> jax.Array:
    """Activated product of an MLP's halves: `[..., 2, F] -> [..., F]`."""
    return ACTIVATIONS[activation](gate_up[..., 0, :]) * gate_up[..., 1, :]


def chosen_experts(logits: jax.Array, count: int, renormalise: bool) -> jax.Array:
    """Weight of every expert, zero outside the `count` likeliest: `[..., E]`, f32.

    Args:
      logits: of the router, `[..., E]`.
      count: experts a token has.
      renormalise: whether the chosen ones' weights sum to one; else they are their
        parts of the softmax over all experts.
    """
    chances = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    best, ids = lax.top_k(chances, count)
    if renormalise:
        best /= jnp.sum(best, axis=-1, keepdims=True)
    is_chosen = jax.nn.one_hot(ids, logits.shape[-1], dtype=jnp.float32)
    return jnp.sum(is_chosen * best[..., None], axis=-2)

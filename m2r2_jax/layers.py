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
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from m2r2_jax.config import FUSED_PRODUCTS

# Norms, softmax and rotary angles are computed in f32 whatever the weights' dtype:
# their sums and the angles of late positions lose too many bits in bf16.

# Up to so many queries a head, transposing the scores is cheaper than the keys.
_FEW_QUERIES = 64
# Up to so many rows, products run faster with the rows as columns.
_COLUMNS = 16
# Values that an arg-max compares at once, and how few are not worth it.
_GROUP, _LEAST_GROUP = 256, 16
# Positions in the finer of the two tables of rotary turns.
_TURN = 256


def linear(
    x: jax.Array, weight: jax.Array, products: str = "plain", dtype=None
) -> jax.Array:
    """Multiplies rows by a weight stored `[out..., in]`, as checkpoints store it.

    This layout is also the fastest on CPU at the row counts of decoding. Operands are
    taken in the weight's dtype, sums are f32.

    Args:
      x: `[..., in]`.
      weight: `[out..., in]`.
      products: as in `ModelConfig`.
      dtype: of the result; the rows' by default.

    Returns:
      `[..., out...]`.
    """
    # XLA's CPU backend has fast kernels for plain matrices only: with more axes the
    # same product took seven times as long.
    matrix = weight.reshape(-1, weight.shape[-1])
    product = _way(products, x, matrix)(x.reshape(-1, x.shape[-1]), matrix)
    product = product.astype(dtype or x.dtype)
    return product.reshape(*x.shape[:-1], *weight.shape[:-1])


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """As `linear`, by a weight stored `[in, out]`."""
    product = _product(x.reshape(-1, x.shape[-1]), weight, 0).astype(x.dtype)
    return product.reshape(*x.shape[:-1], weight.shape[-1])


def _way(products: str, x: jax.Array, weight: jax.Array) -> Callable:
    """The function that multiplies so many rows."""
    count = math.prod(x.shape[:-1])
    if products == "exact":
        return _exact_product
    if products in FUSED_PRODUCTS and count <= _COLUMNS:
        if len(weight) % 2 == 0 and _has_registers(2 * count, products):
            return functools.partial(_fused_sums, registers=FUSED_PRODUCTS[products])
        if count > 1:
            return _as_columns
    return functools.partial(_product, axis=1)


def _fused_sums(x_Ri: jax.Array, weight_oi: jax.Array, registers: int) -> jax.Array:
    """The product as one reduction that reads each weight once, for all rows.

    XLA's CPU backend makes one loop of it, with a sum per row in registers and the
    weight widened to f32 on the way: two rows take the time of one, and half as many
    bytes half the time. Matrix products there copy the weight into blocks first. The
    loop is only fast where sums may be reordered (`compilation.jit`).

    The weight is read at two or four places at once: memory delivers more to several
    streams, and what is read of the rows serves all of them. Each row has a sum at each
    place, in a vector register.
    """
    count, outputs = len(x_Ri), len(weight_oi)
    streams = 4 if outputs % 4 == 0 and 4 * count <= registers // 2 else 2
    rows = _computed_once(x_Ri.astype(weight_oi.dtype).astype(jnp.float32))
    parts = weight_oi.reshape(streams, outputs // streams, -1).astype(jnp.float32)
    terms = tuple(parts[part] * rows[row] for row, part in np.ndindex(count, streams))

    return jnp.stack(_sum_together(terms, 1)).reshape(count, outputs)


def _sum_together(terms: tuple[jax.Array, ...], axis: int) -> tuple[jax.Array, ...]:
    """Sums of arrays of one shape over an axis, in one loop."""

    def add(left, right):
        return tuple(a + b for a, b in zip(left, right, strict=True))

    return lax.reduce(terms, (jnp.float32(0),) * len(terms), add, (axis,))


def _has_registers(sums: int, products: str) -> bool:
    """Whether so many sums of fused products stay in vector registers."""
    return sums <= FUSED_PRODUCTS.get(products, 0) * 3 // 4


def _computed_once(x: jax.Array) -> jax.Array:
    """The same values, which XLA's CPU backend will not compute in their consumers.

    It draws cheap maths, a norm's scale or a transposition, into the loop that reads
    the result, where it would be done again for every output of a weight; divisions
    it keeps out. By the time it is known that the divisor is always 1, and the
    division dropped, the loops are made. `lax.optimization_barrier` is gone by then.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    one = 1 + lax.shift_right_logical(lax.population_count(bits), 6)
    return lax.bitcast_convert_type(lax.div(bits, one), jnp.float32)


def _as_columns(x_Ri: jax.Array, weight_oi: jax.Array, width: int = 0) -> jax.Array:
    """The product with the rows as columns, 4, 8 or 16 of them unless told otherwise.

    XLA's CPU backend then streams the weight half as fast again; for a number between
    it takes longer than for the next of these.
    """
    count = len(x_Ri)
    width = width or max(4, 1 << (count - 1).bit_length())
    rows = jnp.pad(x_Ri.astype(weight_oi.dtype), ((0, width - count), (0, 0)))
    # The barrier keeps XLA from turning the product back.
    return lax.optimization_barrier(_dot(weight_oi, rows, 1, 1)).T[:count]


def _exact_product(x_Ri: jax.Array, weight_oi: jax.Array) -> jax.Array:
    """The product 16 rows at a time: all rows go through one kernel in one shape, so
    none depends on how many others there are.
    """
    count, width = x_Ri.shape
    padded = jnp.pad(x_Ri, ((0, -count % _COLUMNS), (0, 0)))
    groups = padded.reshape(-1, _COLUMNS, width)
    if len(groups) == 1:
        return _as_columns(x_Ri, weight_oi, _COLUMNS)
    product = lax.map(lambda rows: _as_columns(rows, weight_oi, _COLUMNS), groups)
    return product.reshape(len(padded), -1)[:count]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x_Ri: jax.Array, weight: jax.Array, axis: int) -> jax.Array:
    return _dot(x_Ri.astype(weight.dtype), weight, 1, axis)


def _product_forward(x_Ri, weight, axis):
    return _product(x_Ri, weight, axis), (x_Ri, weight)


def _product_backward(axis, saved, grad_Ro):
    # Left to itself, differentiation would multiply in f32 whatever the weight's dtype.
    x_Ri, weight = saved
    grad_Ro = grad_Ro.astype(weight.dtype)
    grad_x = _dot(grad_Ro, weight, 1, 1 - axis).astype(x_Ri.dtype)
    left, right = x_Ri.astype(weight.dtype), grad_Ro
    if axis == 1:
        left, right = right, left
    return grad_x, _dot(left, right, 0, 0).astype(weight.dtype)


_product.defvjp(_product_forward, _product_backward)


def _dot(left: jax.Array, right: jax.Array, left_axis: int, right_axis: int):
    # Sums leave in f32; XLA's CPU backend has fast bf16 kernels of this kind only.
    return lax.dot_general(
        left,
        right,
        (((left_axis,), (right_axis,)), ((), ())),
        preferred_element_type=jnp.float32,
    )


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Root-mean-square normalisation over the last axis, in f32 inside."""
    x_f32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True)
    normalised = x_f32 * lax.rsqrt(mean_square + epsilon)
    return (normalised * scale.astype(jnp.float32)).astype(x.dtype)


def rotary_turns(
    positions: jax.Array, head_dim: int, theta: float, context_length: int
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[..., H/2]` of each pair's angle, f32, for positions `[...]`.

    The turn to a position is the turn to a multiple of `_TURN` and one of less than
    that, both from small tables. Compiled into the layers, cosines would be computed
    anew in each of them, for every head.
    """
    near, far = _turn_tables(head_dim, theta, context_length)
    near_cos, near_sin = jnp.asarray(near)[:, positions % _TURN]
    far_cos, far_sin = jnp.asarray(far)[:, positions // _TURN]
    cos = near_cos * far_cos - near_sin * far_sin
    return cos, near_sin * far_cos + near_cos * far_sin


@functools.cache
def _turn_tables(head_dim: int, theta: float, context_length: int):
    """Turns to 0.._TURN - 1, and to its multiples in the context: `[2, ..., H/2]`."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    steps = np.arange(_TURN), np.arange(0, context_length, _TURN)
    angles = [np.outer(step, frequencies) for step in steps]
    return [np.float32([np.cos(angle), np.sin(angle)]) for angle in angles]


def rotate(x_BRKGH: jax.Array, turns: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Applies rotary position embedding; pairs are (i, i + H/2).

    Args:
      x_BRKGH: queries or keys.
      turns: cosines and sines `[B, R, H/2]`, from `rotary_turns`.
    """
    cos, sin = (turn_BRh[:, :, None, None] for turn_BRh in turns)
    left, right = jnp.split(x_BRKGH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)
    return turned.astype(x_BRKGH.dtype)


def attention(
    q_BRKGH: jax.Array,
    keys_JSH: jax.Array,
    values_JSH: jax.Array,
    mask_BRS: jax.Array,
    products: str = "plain",
) -> jax.Array:
    """Grouped-query attention of R rows over S slots.

    Args:
      q_BRKGH: queries, grouped by the key/value head they read.
      keys_JSH: keys in cache layout: both products then run without a transpose.
      values_JSH: values, same layout.
      mask_BRS: True where a row may read a slot; every row reads at least one.
      products: as in `ModelConfig`.

    Returns:
      `[B, R, K*G*H]`.
    """
    B, R, K, G, H = q_BRKGH.shape
    q_JrH = q_BRKGH.swapaxes(1, 2).reshape(B * K, R * G, H)
    batch = ((0,), (0,))
    scores_JrS = _scores(q_JrH, keys_JSH, products)
    scores_BKRGS = scores_JrS.reshape(B, K, R, G, -1) * H**-0.5
    # A finite floor: a slot that is not written yet can never make a NaN.
    floor = jnp.finfo(jnp.float32).min
    masked = jnp.where(mask_BRS[:, None, :, None], scores_BKRGS, floor)
    weights_JrS = jax.nn.softmax(masked, axis=-1).reshape(scores_JrS.shape)
    out_JrH = lax.dot_general(
        weights_JrS.astype(values_JSH.dtype), values_JSH, (((2,), (1,)), batch)
    )
    return out_JrH.reshape(B, K, R, G * H).swapaxes(1, 2).reshape(B, R, K * G * H)


def _scores(q_JrH: jax.Array, keys_JSH: jax.Array, products: str) -> jax.Array:
    """Products of queries and keys, f32: `[J, r, S]`."""
    batch, queries = ((0,), (0,)), q_JrH.shape[1]
    if _has_registers(queries, products):
        return _fused_scores(q_JrH, keys_JSH)
    few = queries <= _FEW_QUERIES
    left, right = (keys_JSH, q_JrH) if few else (q_JrH, keys_JSH)
    scores = lax.dot_general(
        left, right, (((2,), (2,)), batch), preferred_element_type=jnp.float32
    )
    # XLA would turn the product back to where its output needs no transpose, and with
    # it transpose the keys: three times the time of a decoding step's scores.
    return lax.optimization_barrier(scores).swapaxes(1, 2) if few else scores


def _fused_scores(q_JrH: jax.Array, keys_JSH: jax.Array) -> jax.Array:
    """As `_fused_sums`: one loop that reads each key once, for all queries."""
    q_JrH = _computed_once(q_JrH.astype(keys_JSH.dtype).astype(jnp.float32))
    keys_JSH = keys_JSH.astype(jnp.float32)
    terms = tuple(keys_JSH * q_JrH[:, query, None] for query in range(q_JrH.shape[1]))
    return jnp.stack(_sum_together(terms, 2), axis=1)


def argmax(x: jax.Array) -> jax.Array:
    """`jnp.argmax` over the last axis, of groups first and then inside the best one.

    XLA's CPU backend compares value and index one by one, but vectorises a maximum:
    over a vocabulary this takes a fifth of the time. Its maximum drops NaNs, which
    count as infinite here: the first of either is taken.
    """
    group = math.gcd(x.shape[-1], _GROUP)
    if group < _LEAST_GROUP:
        return jnp.argmax(x, axis=-1)
    groups = x.reshape(*x.shape[:-1], -1, group)
    largest = jnp.max(jnp.where(jnp.isnan(groups), jnp.inf, groups), axis=-1)
    best = jnp.argmax(largest, axis=-1)
    inside = jnp.take_along_axis(groups, best[..., None, None], axis=-2)[..., 0, :]
    return best * group + jnp.argmax(inside, axis=-1)


def gated_product(gate_up: jax.Array) -> jax.Array:
    """SiLU-gated product of an MLP's halves: `[..., 2, F] -> [..., F]`."""
    return jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]

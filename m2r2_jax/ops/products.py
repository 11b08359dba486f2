"""Products of rows and weights, in the way that is fastest for so many rows.

Letters as in `layers`; i and o are a weight's inputs and outputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from m2r2_jax.ops.execution import PLAIN, Execution

# Up to so many rows, products run faster with the rows as columns.
_COLUMNS = 16
# Outputs that the widest vectors hold.
_VECTOR = 16


def linear(
    x: jax.Array,
    weight: jax.Array,
    execution: Execution = PLAIN,
    dtype=None,
) -> jax.Array:
    """Multiplies rows by a weight stored `[out..., in]`, as checkpoints store it.

    This layout is also the fastest on CPU at the row counts of decoding. Operands are
    taken in the weight's dtype, sums are f32.

    Args:
      x: `[..., in]`.
      weight: `[out..., in]`.
      execution: how it is done here.
      dtype: of the result; the rows' by default.

    Returns:
      `[..., out...]`.
    """
    # XLA's CPU backend has fast kernels for plain matrices only: with more axes the
    # same product took seven times as long.
    matrix = weight.reshape(-1, weight.shape[-1])
    product = _way(execution, x, matrix)(x.reshape(-1, x.shape[-1]), matrix)
    product = product.astype(dtype or x.dtype)
    return product.reshape(*x.shape[:-1], *weight.shape[:-1])


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """As `linear`, by a weight stored `[in, out]`."""
    product = _product(x.reshape(-1, x.shape[-1]), weight, 0).astype(x.dtype)
    return product.reshape(*x.shape[:-1], weight.shape[-1])


def fused_scores(q_JrH: jax.Array, keys_JSH: jax.Array) -> jax.Array:
    """Products of queries and keys, `[J, r, S]`: one loop that reads each key once.

    For as many queries as have registers; see `_fused_sums`.
    """
    q_JrH = _computed_once(q_JrH.astype(keys_JSH.dtype).astype(jnp.float32))
    keys_JSH = keys_JSH.astype(jnp.float32)
    terms = tuple(keys_JSH * q_JrH[:, query, None] for query in range(q_JrH.shape[1]))
    return jnp.stack(_sum_together(terms, 2), axis=1)


def _way(execution: Execution, x: jax.Array, weight: jax.Array) -> Callable:
    """The function that multiplies so many rows."""
    count = math.prod(x.shape[:-1])
    if execution.products == "exact":
        return _exact_product
    if execution.products == "fused" and count <= _COLUMNS:
        if len(weight) % 2 == 0 and execution.has_registers(2 * count):
            return functools.partial(_fused_sums, registers=execution.registers)
        if count > 1:
            return _as_columns
    if count == 1 and len(weight) % _VECTOR:
        return _as_one_of_two
    return functools.partial(_product, axis=1)


def _fused_sums(x_Ri: jax.Array, weight_oi: jax.Array, registers: int) -> jax.Array:
    """The product as one reduction that reads each weight once, for all rows.

    XLA's CPU backend makes one loop of it, with a sum per row in registers and the
    weight widened to f32 on the way: two rows take the time of one, and half as many
    bytes half the time. Matrix products there copy the weight into blocks first. The
    loop is only fast where sums may be reordered (`Execution.compiler_options`).

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


def _computed_once(x: jax.Array) -> jax.Array:
    """The same values, which XLA's CPU backend will not compute in their consumers.

    It draws cheap maths, a norm's scale or a transposition, into the loop that reads
    the result, where it would be done again for every output of a weight; divisions
    it keeps out. By the time it is known that the divisor is always 1, and the
    division dropped, the loops are made. `lax.optimization_barrier` is gone by then.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    one = 1 + lax.shift_right_logical(lax.population_count(bits), jnp.int32(6))
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


def _as_one_of_two(x_1i: jax.Array, weight_oi: jax.Array) -> jax.Array:
    """One row's product in the kernel of two.

    XLA's CPU backend sums the last outputs of a single row, where they fill no vector,
    in another order: equal rows of a weight would get unequal results there, and of
    two equal logits the higher id might win.
    """
    rows = jnp.pad(x_1i.astype(weight_oi.dtype), ((0, 1), (0, 0)))
    return lax.optimization_barrier(_dot(rows, weight_oi, 1, 1))[:1]


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

"""How XLA lays matrices out in a TPU's memory, and what that means for kernels.

Memory is tiled: 128 lanes of the minor axis by 8 (or 32, of eight bits) of the other,
and both are padded. XLA makes that axis minor which wastes less, so `[1536, 576]` lies
transposed. A kernel always takes the last axis as minor: asked for the matrix as its
shape has it, it would have it copied, whole, before every call. Asked for a transposed
view, it costs nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128
# Of the 128 MiB on v5e and v6e; compilers keep some for themselves.
MOST_VMEM = 100 * 2**20


def padded(size: int, multiple: int) -> int:
    """The next multiple of a tile's side."""
    return -(-size // multiple) * multiple


def lies_transposed(array) -> bool:
    """Whether XLA makes the last but one axis minor."""
    rows, columns = array.shape[-2:]
    sublanes = 32 if array.dtype.itemsize == 1 else 8
    as_shaped = padded(rows, sublanes) * padded(columns, LANES)
    transposed = padded(columns, sublanes) * padded(rows, LANES)
    return transposed < as_shaped


def as_stored(array: jax.Array, axis: int) -> tuple[jax.Array, int]:
    """A view whose last axis is minor, and where one of its axes has gone.

    Args:
      array: `[..., a, b]`.
      axis: -1 or -2, followed through the transposition.
    """
    if lies_transposed(array):
        return array.swapaxes(-1, -2), -3 - axis
    return array, axis


def dot(left: jax.Array, right: jax.Array, axis: int) -> jax.Array:
    """Product over the left's last and the right's given axis, summed in f32."""
    return lax.dot_general(
        left,
        right,
        (((1,), (axis % 2,)), ((), ())),
        # Without it, f32 operands would be rounded to bf16.
        precision=lax.Precision.HIGHEST if left.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def check_vmem(need: int, what: str) -> int:
    """The bytes of VMEM to ask for.

    Raises:
      NotImplementedError: more than there is; the message begins with `what`.
    """
    if need > MOST_VMEM:
        raise NotImplementedError(
            f"{what} need {need / 2**20:.0f} MiB of VMEM, over {MOST_VMEM / 2**20:.0f}"
        )
    return need

"""The product that references are made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def product(left: jax.Array, right: jax.Array, letters: str) -> jax.Array:
    """A product in the right operand's dtype, summed in f32: an `einsum` of `letters`.

    f32 operands are not rounded to bf16 on the way.
    """

    def multiply(left, right):
        return jnp.einsum(
            letters,
            left,
            right,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    def widened(left, right):
        # XLA's CPU backend has no batched product of bf16 with f32 sums.
        return multiply(left.astype(jnp.float32), right.astype(jnp.float32))

    return lax.platform_dependent(
        left.astype(right.dtype), right, cpu=widened, default=multiply
    )

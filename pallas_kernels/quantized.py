"""Weights of eight bits with a scale per output channel."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

_LARGEST = 127


class QTensor(NamedTuple):
    """A weight `values * scale`; a pytree, so it stands where an array stood.

    Attributes:
      values: `int8[..., out, in]`.
      scale: `f32[..., out]`.
    """

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight, `[..., out, in]`."""
        return self.values.shape

    def dequantize(self) -> jax.Array:
        """The weight in f32."""
        return self.values.astype(jnp.float32) * self.scale[..., None]


def quantize(weight: jax.Array) -> QTensor:
    """Rounds a weight `[..., out, in]` to eight bits, symmetric, per output channel."""
    weight = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(weight), axis=-1) / _LARGEST
    # A channel of zeros has no scale; any will do.
    scale = jnp.where(scale == 0, 1.0, scale)
    values = jnp.round(weight / scale[..., None])
    return QTensor(values.astype(jnp.int8), scale)

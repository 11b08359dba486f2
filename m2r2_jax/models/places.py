"""The places of a block where rows meet a weight, and what stands around each product.

Every row goes through a weight in the same product, slow rows first, so that it is read
once; fast rows get the accelerators' low-rank term on top. Here XLA multiplies, for
every family; `fused_places` does a place in one kernel.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from m2r2_jax.models import layers
from m2r2_jax.models.config import Decoder
from m2r2_jax.ops.products import linear, matmul

# The norm that rows pass before a weight, and the part of the block a weight ends.
NORM_BEFORE = {"qkv": "attention_norm", "gate_up": "mlp_norm"}
PART_ENDED = {"out": "attention", "down": "mlp"}


def low_rank(pair: dict, x: jax.Array) -> jax.Array:
    """`(x A) B`: `[..., in] -> [..., out]`."""
    return matmul(matmul(x, pair["down"]), pair["up"])


@dataclasses.dataclass(frozen=True)
class Places:
    """One layer's weights, and how rows `[B, R, D]` go through them.

    Attributes:
      decoder: the model, and how it runs.
      weights: the layer's, as in `weight_specs`.
      pairs: the layer's accelerators; None where all rows are slow ones.
      slow: how many leading rows are slow ones.
    """

    decoder: Decoder
    weights: dict
    pairs: dict | None
    slow: int

    def into(self, name: str, x_BRD: jax.Array) -> jax.Array:
        """The norm before a weight, and the product."""
        return self.multiply(name, self.norm(NORM_BEFORE[name], x_BRD))

    def gated(self, x_BRD: jax.Array) -> jax.Array:
        """The norm, gate and up, and their gated product: `[B, R, F]`."""
        return layers.gated_product(
            self.into("gate_up", x_BRD), self.decoder.config.activation
        )

    def onto(self, name: str, x: jax.Array, residual_BRD: jax.Array) -> jax.Array:
        """The product that ends a part of the block, added to the residual stream."""
        return self.add(PART_ENDED[name], residual_BRD, self.multiply(name, x))

    def attend(self, q_BRKGH, keys_JSH, values_JSH, mask_BRS, stop_B) -> jax.Array:
        """Attention of the rows over the slots, `[B, R, K*G*H]`.

        `stop_B` is one past the last slot that any row reads; None for all.
        """
        del stop_B  # The mask says it all.
        config = self.decoder.config
        return layers.attention(
            q_BRKGH,
            keys_JSH,
            values_JSH,
            mask_BRS,
            self.decoder.execution,
            config.attention_scale,
            config.attention_cap,
        )

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        """The norm of that name; nothing where the model has none."""
        if name not in self.weights:
            return x
        epsilon = self.decoder.config.norm_epsilon
        return layers.rms_norm(x, self.weights[name], epsilon)

    def add(self, part: str, x_BRD: jax.Array, added: jax.Array) -> jax.Array:
        """The residual stream with what a part of the block adds to it."""
        added = self.norm(f"{part}_out_norm", added)
        if (multiplier := self.decoder.config.residual_multiplier) != 1:
            added = added * multiplier
        return x_BRD + added

    def multiply(self, name: str, x_BRI: jax.Array) -> jax.Array:
        """The product, with the low-rank term of the fast rows and the bias."""
        product = linear(x_BRI, self.weights[name], self.decoder.execution)
        if self.pairs is not None:
            product = self._with_low_rank(name, x_BRI[:, self.slow :], product)
        if name in self.decoder.config.biases:
            product = product + self.weights[f"{name}_bias"]
        return product

    def _with_low_rank(self, name: str, fast_BTI: jax.Array, product: jax.Array):
        if name == "qkv":
            K, width, H = self.weights[name].shape[:3]
            delta = low_rank(self.pairs["q"], fast_BTI)
            delta = delta.reshape(*fast_BTI.shape[:2], K, width - 2, H)
            return product.at[:, self.slow :, :, :-2].add(delta)
        if name == "gate_up":
            halves = [low_rank(self.pairs[half], fast_BTI) for half in ("gate", "up")]
            return product.at[:, self.slow :].add(jnp.stack(halves, axis=-2))
        pair = self.pairs.get("o" if name == "out" else name)
        if pair is None:
            return product
        return product.at[:, self.slow :].add(low_rank(pair, fast_BTI))


def places_of(
    decoder: Decoder, weights: dict, pairs: dict | None, slow: int, x_BRD: jax.Array
) -> Places:
    """The way in which these rows go through a layer's weights."""
    if decoder.execution.kernels is not None:
        # Imported here: Pallas is slow to import, and most machines do without.
        from m2r2_jax.models.fused_places import FusedPlaces

        rows = x_BRD.shape[0] * x_BRD.shape[1]
        if FusedPlaces.serves(decoder, weights, rows):
            return FusedPlaces(decoder, weights, pairs, slow)
    return Places(decoder, weights, pairs, slow)

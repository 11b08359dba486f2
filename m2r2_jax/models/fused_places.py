"""The places of a block as fused kernels, each tile of a weight read once.

The norm before a weight, its product for the rows of both streams, the low-rank term of
the fast ones and what follows are one call of `pallas_kernels`. `Execution.kernels`
names the implementation, which never falls back; what a pass cannot be served with
(`FusedPlaces.serves`) goes through XLA by the same rule on every run.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from m2r2_jax.models.config import Decoder
from m2r2_jax.models.places import NORM_BEFORE, PART_ENDED, Places
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.fast_update import MAX_ROWS, LowRank, fast_update


class FusedPlaces(Places):
    """Each place is one kernel: norm, products, low-rank term, what follows."""

    @staticmethod
    def serves(decoder: Decoder, weights: dict, rows: int) -> bool:
        """Whether the kernels can do a pass of so many rows through these weights:
        dense blocks that norm before and not after, as Llama's, and few rows.
        """
        config = decoder.config
        fits = not config.biases and config.experts is None
        fits = fits and config.activation == "silu" and config.residual_multiplier == 1
        normed = weights.keys() >= set(NORM_BEFORE.values())
        after = weights.keys() & {f"{part}_out_norm" for part in PART_ENDED.values()}
        return fits and normed and not after and 2 <= rows <= MAX_ROWS

    def into(self, name: str, x_BRD: jax.Array) -> jax.Array:
        weight = self.weights[name]
        flat = weight.reshape(-1, weight.shape[-1])
        y = self._update(flat, self._into_term(name), x_BRD, norm=NORM_BEFORE[name])
        return y.reshape(*x_BRD.shape[:2], *weight.shape[:-1])

    def gated(self, x_BRD: jax.Array) -> jax.Array:
        term = None
        if self.pairs is not None:
            pairs = self.pairs["gate"], self.pairs["up"]
            term = [jnp.stack([pair[end] for pair in pairs]) for end in ("down", "up")]
            term = LowRank(*term)
        return self._update(self.weights["gate_up"], term, x_BRD, norm="mlp_norm")

    def onto(self, name: str, x: jax.Array, residual_BRD: jax.Array) -> jax.Array:
        term = None
        if self.pairs is not None:
            pair = self.pairs["o" if name == "out" else name]
            term = LowRank(pair["down"], pair["up"])
        return self._update(self.weights[name], term, x, residual=residual_BRD)

    def attend(self, q_BRKGH, keys_JSH, values_JSH, mask_BRS, stop_B) -> jax.Array:
        config = self.decoder.config
        if stop_B is None or config.attention_cap is not None:
            return super().attend(q_BRKGH, keys_JSH, values_JSH, mask_BRS, stop_B)
        return decode_attention(
            q_BRKGH,
            keys_JSH,
            values_JSH,
            mask_BRS,
            stop_B=stop_B,
            scale=config.attention_scale,
            implementation=self.decoder.execution.kernels,
        )

    def _into_term(self, name: str) -> LowRank | None:
        """Accelerators of q, with zeros where the product has keys and values."""
        if self.pairs is None:
            return None
        K, width, H, _ = self.weights[name].shape
        pair = self.pairs["q"]
        up = pair["up"].reshape(-1, K, width - 2, H)
        up = jnp.pad(up, ((0, 0), (0, 0), (0, 2), (0, 0)))
        return LowRank(pair["down"], up.reshape(len(up), -1))

    def _update(self, weight, term, x_BRI, *, norm=None, residual=None) -> jax.Array:
        """One kernel over all rows of the batch, those of the slow stream first."""
        B, R = x_BRI.shape[:2]
        slow = R if self.pairs is None else self.slow
        y = fast_update(
            _slow_first(x_BRI, slow),
            weight,
            term,
            slow=B * slow,
            residual_Ro=None if residual is None else _slow_first(residual, slow),
            norm_i=None if norm is None else self.weights[norm],
            epsilon=self.decoder.config.norm_epsilon,
            implementation=self.decoder.execution.kernels,
        )
        parts = y[: B * slow], y[B * slow :]
        return jnp.concatenate([part.reshape(B, -1, y.shape[1]) for part in parts], 1)


def _slow_first(x_BRI: jax.Array, slow: int) -> jax.Array:
    """Rows of all sequences `[B*R, in]`, the slow ones of all of them first."""
    parts = x_BRI[:, :slow], x_BRI[:, slow:]
    return jnp.concatenate([part.reshape(-1, x_BRI.shape[2]) for part in parts])

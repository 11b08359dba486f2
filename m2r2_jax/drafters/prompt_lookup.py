"""Prompt lookup: drafts are copied from where the last tokens stood before."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from m2r2_jax.decoding.drafting import Context
from m2r2_jax.drafters.stateless import StatelessChain
from m2r2_jax.models.config import Decoder


@dataclasses.dataclass(frozen=True)
class PromptLookup(StatelessChain):
    """Copies what followed the latest earlier occurrence of the last n-gram.

    The longest matching n-gram wins. Without a match no draft is valid and the round
    is a plain step. After Saxena's prompt lookup decoding; it takes the first match
    where we take the latest.

    Attributes:
      length: tokens to copy at most.
      max_ngram: longest suffix to look for.
      min_ngram: shortest.
    """

    length: int
    max_ngram: int
    min_ngram: int

    def drafts(self, decoder: Decoder, context: Context) -> tuple[jax.Array, jax.Array]:
        return jax.vmap(self._lookup)(context.history, context.length)

    def _lookup(self, history_S: jax.Array, length: jax.Array):
        """Drafts `[k]` and their validity of one row."""
        slot_S = jnp.arange(history_S.shape[0])
        following = jnp.int32(-1)
        matches_S = jnp.ones_like(slot_S, jnp.bool_)
        for size in range(1, self.max_ngram + 1):
            # matches_S[s]: the `size` tokens before slot s equal the last ones.
            shifted_S = jnp.roll(history_S, size)
            suffix = history_S[jnp.maximum(length - size, 0)]
            matches_S &= (shifted_S == suffix) & (slot_S >= size)
            if size >= self.min_ngram:
                latest = jnp.max(jnp.where(matches_S & (slot_S < length), slot_S, -1))
                following = jnp.where(latest >= 0, latest, following)
        source_k = following + jnp.arange(self.length)
        valid_k = (following >= 0) & (source_k < length)
        return history_S[source_k % history_S.shape[0]], valid_k

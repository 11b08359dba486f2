"""Random drafts: the control that shows what verification alone costs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from m2r2_jax.decoding.drafting import Context
from m2r2_jax.drafters.stateless import StatelessChain
from m2r2_jax.models.config import Decoder


@dataclasses.dataclass(frozen=True)
class RandomDraft(StatelessChain):
    """Proposes `length` tokens drawn uniformly from the vocabulary."""

    length: int

    def drafts(self, decoder: Decoder, context: Context) -> tuple[jax.Array, jax.Array]:
        size = decoder.config.vocab_size
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(
            jax.random.key(0), context.length
        )
        drafts_Bk = jax.vmap(
            lambda key: jax.random.randint(key, (self.length,), 0, size, jnp.int32)
        )(keys_B)
        return drafts_Bk, jnp.ones_like(drafts_Bk, jnp.bool_)

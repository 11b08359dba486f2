"""Random drafts: the control that shows what verification alone costs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from m2r2_jax.decoding.speculative import Context
from m2r2_jax.drafters.stateless import StatelessChain


@dataclasses.dataclass(frozen=True)
class RandomDraft(StatelessChain):
    """Proposes `length` tokens drawn uniformly from the vocabulary."""

    vocab_size: int
    length: int

    def drafts(self, context: Context) -> tuple[jax.Array, jax.Array]:
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(
            jax.random.key(0), context.length
        )
        drafts_Bk = jax.vmap(
            lambda key: jax.random.randint(key, (self.length,), 0, self.vocab_size)
        )(keys_B)
        return drafts_Bk, jnp.ones_like(drafts_Bk, jnp.bool_)

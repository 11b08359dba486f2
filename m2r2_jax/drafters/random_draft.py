"""Random drafts: the control that shows what verification alone costs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from m2r2_jax.cache import KVCache
from m2r2_jax.speculative import Context, Layout, Outcome, Proposal


@dataclasses.dataclass(frozen=True)
class RandomDraft:
    """Proposes `length` tokens drawn uniformly from the vocabulary."""

    vocab_size: int
    length: int

    @property
    def layout(self) -> Layout:
        return Layout.chain(self.length)

    def init(self, params: dict, hidden_BD: jax.Array) -> tuple[()]:
        return ()

    def propose(
        self, params: dict, state: tuple[()], context: Context
    ) -> tuple[Proposal, tuple[()], KVCache]:
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(
            jax.random.key(0), context.length
        )
        drafts_Bk = jax.vmap(
            lambda key: jax.random.randint(key, (self.length,), 0, self.vocab_size)
        )(keys_B)
        tokens_Bn = jnp.concatenate([context.root[:, None], drafts_Bk], axis=1)
        valid_Bn = jnp.ones_like(tokens_Bn, jnp.bool_)
        return Proposal(tokens_Bn, valid_Bn), state, context.cache

    def update(self, params: dict, state: tuple[()], outcome: Outcome) -> tuple[()]:
        return state

"""What drafters share that read the text so far and keep nothing between rounds."""

from __future__ import annotations

import abc

import jax
import jax.numpy as jnp

from m2r2_jax.decoding.drafting import Context, Layout, Outcome, Prefill, Proposal
from m2r2_jax.models.cache import KVCache
from m2r2_jax.models.config import Decoder


class StatelessChain(abc.ABC):
    """A chain of `length` drafts that depends on the text so far alone."""

    length: int
    start_layer = 0

    @abc.abstractmethod
    def drafts(self, decoder: Decoder, context: Context) -> tuple[jax.Array, jax.Array]:
        """Drafts `int32[B, length]`, and which of them are valid, `bool`."""

    @property
    def layout(self) -> Layout:
        return Layout.chain(self.length)

    def init(self, decoder: Decoder, params: dict, prefill: Prefill) -> tuple[()]:
        return ()

    def propose(
        self, decoder: Decoder, params: dict, state: tuple[()], context: Context
    ) -> tuple[Proposal, tuple[()], KVCache]:
        drafts_Bk, valid_Bk = self.drafts(decoder, context)
        tokens_Bn = jnp.concatenate([context.root[:, None], drafts_Bk], axis=1)
        valid_Bn = jnp.pad(valid_Bk, ((0, 0), (1, 0)), constant_values=True)
        return Proposal(tokens_Bn, valid_Bn), state, context.cache

    def update(
        self, decoder: Decoder, params: dict, state: tuple[()], outcome: Outcome
    ) -> tuple[()]:
        return state

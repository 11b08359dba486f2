"""Plain decoding: nothing is drafted, a round is one step of the model."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from m2r2_jax.decoding.drafting import Context, Layout, Outcome, Prefill, Proposal
from m2r2_jax.models.cache import KVCache
from m2r2_jax.models.config import Decoder


@dataclasses.dataclass(frozen=True)
class NoDrafts:
    """Proposes the root alone."""

    layout = Layout((-1,))
    start_layer = 0

    def init(self, decoder: Decoder, params: dict, prefill: Prefill) -> tuple[()]:
        return ()

    def propose(
        self, decoder: Decoder, params: dict, state: tuple[()], context: Context
    ) -> tuple[Proposal, tuple[()], KVCache]:
        root_B1 = context.root[:, None]
        return Proposal(root_B1, jnp.ones_like(root_B1, bool)), state, context.cache

    def update(
        self, decoder: Decoder, params: dict, state: tuple[()], outcome: Outcome
    ) -> tuple[()]:
        return state

"""M2R2 as a drafter: a chain drafted by the accelerated stream of the early layers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from m2r2_jax import decoding, multirate, transformer
from m2r2_jax.cache import KVCache
from m2r2_jax.config import ModelConfig
from m2r2_jax.speculative import Context, Layout, Outcome, Proposal


@dataclasses.dataclass(frozen=True)
class MultiRateChain:
    """Drafts `length` tokens, each from the exit of the layers below `exit_layer`.

    Drafting k tokens takes k + 1 early passes, the root's included. A pass runs both
    streams of one token; its slow stream is the real one, so its keys, values and
    exit state are handed over and verification starts at the exit.

    `params["accelerators"]` holds the stream's parameters.
    """

    config: ModelConfig
    exit_layer: int
    length: int

    @property
    def layout(self) -> Layout:
        return Layout.chain(self.length, start_layer=self.exit_layer)

    def init(self, params: dict, hidden_BD: jax.Array) -> jax.Array:
        """The state is the final state of the root's predecessor, for the carry."""
        return hidden_BD

    def propose(
        self, params: dict, state: jax.Array, context: Context
    ) -> tuple[Proposal, jax.Array, KVCache]:
        n, B = self.layout.size, context.root.shape[0]
        tokens_Bn = jnp.zeros((B, n), jnp.int32).at[:, 0].set(context.root)
        hidden_BnD = jnp.zeros((B, n, self.config.width), state.dtype)
        carry = (tokens_Bn, hidden_BnD, state, context.cache)

        def draft(row, carry):
            tokens_Bn, hidden_BnD, carried_BD, cache = carry
            slow_BD, fast_BD, cache = self._pass(
                params, tokens_Bn, row, carried_BD, cache
            )
            exit_BD = transformer.final_norm(self.config, params["model"], fast_BD)
            logits_BV = transformer.unembed(params["model"], exit_BD)
            position_B = context.length + row
            drafted_B1 = decoding.choose(
                logits_BV[:, None], context.sampling, position_B[:, None]
            )
            tokens_Bn = lax.dynamic_update_slice(tokens_Bn, drafted_B1, (0, row + 1))
            hidden_BnD = hidden_BnD.at[:, row].set(slow_BD)
            return tokens_Bn, hidden_BnD, exit_BD, cache

        tokens_Bn, hidden_BnD, carried_BD, cache = lax.fori_loop(
            0, self.length, draft, carry
        )
        # The last draft needs its early layers too, but no draft of its own: no head.
        slow_BD, _, cache = self._pass(
            params, tokens_Bn, self.length, carried_BD, cache
        )
        hidden_BnD = hidden_BnD.at[:, self.length].set(slow_BD)
        valid_Bn = jnp.ones((B, n), jnp.bool_)
        return Proposal(tokens_Bn, valid_Bn, hidden_BnD), state, cache

    def update(self, params: dict, state: jax.Array, outcome: Outcome) -> jax.Array:
        """Keeps the final state of the token before the new root."""
        last_B1 = jnp.maximum(outcome.count - 1, 0)[:, None]
        row_B1 = jnp.take_along_axis(outcome.path, last_B1, axis=1)
        kept_BD = jnp.take_along_axis(outcome.hidden, row_B1[..., None], axis=1)[:, 0]
        return jnp.where(outcome.count[:, None] > 0, kept_BD, state)

    def _pass(self, params: dict, tokens_Bn, row, carried_BD, cache: KVCache):
        """Both streams of one row through the early layers; writes its scratch slot."""
        model, accelerators = params["model"], params["accelerators"]
        ahead = cache.advance(row)
        rows = transformer.cached_rows(
            self.config, ahead, np.zeros(1, np.int32), np.ones((1, 1), bool)
        )
        token_B1 = lax.dynamic_slice_in_dim(tokens_Bn, row, 1, axis=1)
        slow_B1D = transformer.embed(model, token_B1)
        fast_B1D = multirate.start(accelerators, slow_B1D, carried_BD[:, None])
        slow_B1D, fast_B1D, ahead = multirate.run_both(
            self.config,
            model["blocks"],
            accelerators,
            slow_B1D,
            fast_B1D,
            rows,
            ahead,
            self.exit_layer,
        )
        return slow_B1D[:, 0], fast_B1D[:, 0], ahead.replace(length=cache.length)

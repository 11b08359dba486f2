"""M2R2 as a drafter: a chain drafted by the accelerated stream of the early layers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from m2r2_jax.decoding import sampling
from m2r2_jax.decoding.drafting import Context, Layout, Outcome, Prefill, Proposal
from m2r2_jax.decoding.loop import run_if
from m2r2_jax.models import multirate, transformer
from m2r2_jax.models.cache import KVCache
from m2r2_jax.models.config import Decoder


@struct.dataclass
class _Draft:
    """What a round has drafted so far.

    Attributes:
      tokens: `int32[B, n]`, the root first.
      valid: `bool[B, n]`.
      hidden: h[X] of the rows that were run, `[B, n, D]`.
      carried: normalised state that seeds the next row's stream, `[B, D]`.
      cache: early layers hold the rows that were run in their scratch slots.
    """

    tokens: jax.Array
    valid: jax.Array
    hidden: jax.Array
    carried: jax.Array
    cache: KVCache


@dataclasses.dataclass(frozen=True)
class MultiRateChain:
    """Drafts up to `length` tokens from the exit of the layers below `exit_layer`.

    Drafting k tokens takes k + 1 early passes, the root's included. A pass runs both
    streams of one token; its slow stream is the real one, so its keys, values and
    exit state are handed over and verification starts at the exit.

    Drafting stops where every row's confidence, the probability of its draft at the
    exit, has fallen below `min_confidence`: neither is the draft verified, nor are
    passes spent behind it.

    `params["accelerators"]` holds the stream's parameters, `params["head"]` the
    `draft_head.DraftHead`.
    """

    exit_layer: int
    length: int
    min_confidence: float = 0.0

    @property
    def layout(self) -> Layout:
        return Layout.chain(self.length)

    @property
    def start_layer(self) -> int:
        return self.exit_layer

    def init(self, decoder: Decoder, params: dict, prefill: Prefill) -> jax.Array:
        """The state is the final state of the root's predecessor, for the carry."""
        return prefill.hidden

    def propose(
        self, decoder: Decoder, params: dict, state: jax.Array, context: Context
    ) -> tuple[Proposal, jax.Array, KVCache]:
        n, B = self.layout.size, context.root.shape[0]
        draft = _Draft(
            tokens=jnp.zeros((B, n), jnp.int32).at[:, 0].set(context.root),
            valid=jnp.zeros((B, n), jnp.bool_).at[:, 0].set(True),
            hidden=jnp.zeros((B, n, decoder.config.width), state.dtype),
            carried=state,
            cache=context.cache,
        )

        def confident(turn):
            row, draft = turn
            return (row < self.length) & jnp.any(draft.valid[:, row])

        def step(turn):
            row, draft = turn
            draft, fast_BD = self._pass(decoder, params, row, draft)
            return row + 1, self._extend(decoder, params, context, row, draft, fast_BD)

        _, draft = lax.while_loop(confident, step, (jnp.int32(0), draft))
        # The last draft needs its early layers too, but no draft of its own.
        draft = run_if(
            jnp.any(draft.valid[:, self.length]),
            lambda draft: self._slow_pass(decoder, params, self.length, draft),
            draft,
        )
        return Proposal(draft.tokens, draft.valid, draft.hidden), state, draft.cache

    def update(
        self, decoder: Decoder, params: dict, state: jax.Array, outcome: Outcome
    ) -> jax.Array:
        """Keeps the final state of the token before the new root."""
        last_B1 = jnp.maximum(outcome.count - 1, 0)[:, None]
        row_B1 = jnp.take_along_axis(outcome.path, last_B1, axis=1)
        kept_BD = jnp.take_along_axis(outcome.hidden, row_B1[..., None], axis=1)[:, 0]
        return jnp.where(outcome.count[:, None] > 0, kept_BD, state)

    def _pass(
        self, decoder: Decoder, params: dict, row: jax.Array | int, draft: _Draft
    ) -> tuple[_Draft, jax.Array]:
        """Both streams of one row through the early layers; writes its scratch slot.

        Returns:
          The draft with the row's hand-over state, and p[X], `[B, D]`.
        """
        model, accelerators = params["model"], params["accelerators"]
        embedded_B1D, rows, ahead = self._next_row(decoder, model, row, draft)
        slow_B1D, fast_B1D, ahead = multirate.run_both(
            decoder,
            model["blocks"],
            accelerators,
            embedded_B1D,
            multirate.start(accelerators, embedded_B1D, draft.carried[:, None]),
            rows,
            ahead,
            self.exit_layer,
        )
        return _hand_over(draft, row, slow_B1D, ahead), fast_B1D[:, 0]

    def _slow_pass(
        self, decoder: Decoder, params: dict, row: int, draft: _Draft
    ) -> _Draft:
        """As `_pass`, for a row that drafts nothing: no accelerated stream."""
        model = params["model"]
        x_B1D, rows, ahead = self._next_row(decoder, model, row, draft)
        slow_B1D, ahead = transformer.run_layers(
            decoder, model["blocks"], x_B1D, rows, ahead, 0, self.exit_layer
        )
        return _hand_over(draft, row, slow_B1D, ahead)

    def _next_row(
        self, decoder: Decoder, model: dict, row: jax.Array | int, draft: _Draft
    ) -> tuple[jax.Array, transformer.Rows, KVCache]:
        """A row's embedded token, its place, and the cache up to it."""
        ahead = draft.cache.advance(row)
        rows = transformer.cached_rows(
            decoder.config, ahead, np.zeros(1, np.int32), np.ones((1, 1), bool)
        )
        token_B1 = lax.dynamic_slice_in_dim(draft.tokens, row, 1, axis=1)
        return transformer.embed(decoder.config, model, token_B1), rows, ahead

    def _extend(
        self,
        decoder: Decoder,
        params: dict,
        context: Context,
        row: jax.Array,
        draft: _Draft,
        fast_BD: jax.Array,
    ) -> _Draft:
        """Drafts the token after `row` from its p[X]."""
        exit_BD = multirate.exit_state(
            decoder.config,
            params["model"],
            params["accelerators"],
            fast_BD,
            draft.carried,
        )
        head = params["head"]
        logits_BH = head.logits(exit_BD, decoder.execution, jnp.float32)
        position_B1 = (context.length + row)[:, None]
        drafted_B1 = sampling.choose(
            logits_BH[:, None], context.sampling, position_B1, head
        )
        best_B1 = jnp.take_along_axis(logits_BH, head.slot[drafted_B1], axis=1)
        log_confidence_B1 = best_B1 - jax.nn.logsumexp(logits_BH, axis=1, keepdims=True)
        confident_B1 = jnp.exp(log_confidence_B1) >= self.min_confidence
        valid_B1 = lax.dynamic_slice_in_dim(draft.valid, row, 1, axis=1)
        valid_B1 &= confident_B1
        return draft.replace(
            tokens=_put(draft.tokens, drafted_B1, row + 1),
            valid=_put(draft.valid, valid_B1, row + 1),
            carried=exit_BD,
        )


def _hand_over(
    draft: _Draft, row: jax.Array | int, slow_B1D: jax.Array, ahead: KVCache
) -> _Draft:
    """The draft with a row's h[X], and its early keys and values in the scratch."""
    hidden_BnD = _put(draft.hidden, slow_B1D, row)
    cache = ahead.replace(length=draft.cache.length)
    return draft.replace(hidden=hidden_BnD, cache=cache)


def _put(rows_Bn: jax.Array, new_B1: jax.Array, row: jax.Array | int) -> jax.Array:
    """The rows with one of them replaced."""
    return lax.dynamic_update_slice_in_dim(rows_Bn, new_B1, row, axis=1)

"""The state of decoding: one pytree, donated, so that the cache is updated in place.

The last token of a row (the root) is never in the cache yet: after a prompt as after
every round, the cache holds exactly the positions before it (I9).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from m2r2_jax.decoding.adjustments import Adjustments
from m2r2_jax.decoding.sampling import Sampling
from m2r2_jax.models.cache import KVCache


@struct.dataclass
class Trace:
    """Per-round counts of each row, `int32[B, S]`, for acceptance statistics.

    Attributes:
      proposed: depth of the deepest draft that was proposed.
      accepted: drafts that agreed with the model, before any cut at EOS or limit.
      committed: tokens emitted, the model's own included, after the cut.
      rounds: `int32[B]`, rounds in which the row was active.
    """

    proposed: jax.Array
    accepted: jax.Array
    committed: jax.Array
    rounds: jax.Array

    @classmethod
    def empty(cls, batch: int, capacity: int) -> Trace:
        """Host arrays for rows that have run no round."""
        counts = [np.zeros((batch, capacity), np.int32) for _ in range(3)]
        return cls(*counts, np.zeros(batch, np.int32))

    def record(self, proposed_B, accepted_B, count_B) -> Trace:
        """The trace with one round's counts, of the rows that were active in it."""
        row_B, slot_B = jnp.arange(len(count_B)), self.rounds
        active_B = (count_B > 0).astype(jnp.int32)
        return Trace(
            self.proposed.at[row_B, slot_B].set(proposed_B * active_B),
            self.accepted.at[row_B, slot_B].set(accepted_B * active_B),
            self.committed.at[row_B, slot_B].set(count_B),
            self.rounds + active_B,
        )


@struct.dataclass
class DecodeState:
    """Everything the decoding loop carries.

    Attributes:
      cache: keys and values of all positions but the root's.
      history: `int32[B, S]` token ids, prompt then answer; garbage behind `length`.
      limit: `int32[B]`, the length at which a row must stop.
      done: `bool[B]`.
      eos: `int32[E]`, the ids that end an answer; may be empty.
      sampling: how tokens are drawn.
      adjustments: what is changed in their logits before.
      scored: `bool[]`, whether log-probabilities are computed.
      scores: `f32[B, S]`, those of the tokens in the history; zero where not computed.
      trace: what each round did.
      drafter: the drafter's own state.
    """

    cache: KVCache
    history: jax.Array
    limit: jax.Array
    done: jax.Array
    eos: jax.Array
    sampling: Sampling
    adjustments: Adjustments
    scored: jax.Array
    scores: jax.Array
    trace: Trace
    drafter: Any

    @property
    def length(self) -> jax.Array:
        """Tokens in `history`, the root included: `int32[B]`."""
        return self.cache.length + 1

    @property
    def root(self) -> jax.Array:
        """The last token of each row: `int32[B]`."""
        return jnp.take_along_axis(self.history, self.cache.length[:, None], 1)[:, 0]


def emit(
    state: DecodeState,
    tokens_Bn: jax.Array,
    scores_Bn: jax.Array,
    count_B: jax.Array,
) -> tuple[DecodeState, jax.Array]:
    """Appends the first `count` tokens of each row, cut at EOS and at the limit.

    A choice that is no token (`sampling.BROKEN`, `NOTHING`) ends its row too; the host
    raises an error.

    Args:
      state: its cache holds the new root's predecessors in its scratch slots.
      tokens_Bn: verified tokens.
      scores_Bn: their log-probabilities.
      count_B: how many of them are to be emitted.

    Returns:
      The state, with history and cache advanced by the same count, and that count.
    """
    index_n = jnp.arange(tokens_Bn.shape[1])
    is_end_Bn = jnp.any(tokens_Bn[..., None] == state.eos, axis=-1)
    is_end_Bn |= tokens_Bn < 0
    count_B = jnp.minimum(count_B, state.limit - state.length)
    count_B = jnp.where(state.done, 0, count_B)
    ends_Bn = is_end_Bn & (index_n < count_B[:, None])
    ended_B = jnp.any(ends_Bn, axis=-1)
    first_B = lax.argmax(ends_Bn, 1, jnp.int32)
    count_B = jnp.where(ended_B, first_B + 1, count_B)
    cache = state.cache.advance(count_B)
    state = state.replace(
        history=_write_behind(state.history, tokens_Bn, state.length),
        scores=_write_behind(state.scores, scores_Bn, state.length),
        cache=cache,
        done=state.done | ended_B | (cache.length + 1 >= state.limit),
    )
    return state, count_B


def _write_behind(values_BS, new_Bn, start_B):
    """Writes all n values from `start` on; those behind the count stay unread."""

    def row(values_S, new_n, start):
        return lax.dynamic_update_slice(values_S, new_n, (start,))

    return jax.vmap(row)(values_BS, new_Bn, start_B)

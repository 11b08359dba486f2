"""Draft-verify decoding: one loop for every drafter.

A round: the drafter proposes a fixed layout of rows behind the root, the model scores
them in one pass, the longest agreeing path is emitted together with the model's own
next token, and the cache is advanced by exactly that. A draft is accepted iff it
equals the token the model chooses at that position, greedy or sampled with shared
noise, so the output is the model's own, whatever the drafter says.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from m2r2_jax.decoding import plain
from m2r2_jax.decoding.plain import DecodeState
from m2r2_jax.decoding.sampling import Sampling
from m2r2_jax.models.cache import KVCache
from m2r2_jax.models.config import ModelConfig
from m2r2_jax.ops import compilation


@dataclasses.dataclass(frozen=True)
class Layout:
    """The fixed shape of a round's rows: a tree whose row 0 is the root token.

    Attributes:
      parent: parent row of each row, smaller than the row itself; -1 for the root.
      start_layer: layers below it have been run, and their keys and values written,
        by the drafter.
    """

    parent: tuple[int, ...]
    start_layer: int = 0

    def __post_init__(self):
        ordered = all(0 <= p < i for i, p in enumerate(self.parent) if i)
        if not self.parent or self.parent[0] != -1 or not ordered:
            raise ValueError(
                f"layout parents {self.parent} are not a tree: row 0 must have parent "
                "-1 and every other row a parent before it"
            )

    @classmethod
    def chain(cls, length: int, start_layer: int = 0) -> Layout:
        """The root followed by `length` drafts in a line.

        Raises:
          ValueError: fewer than one draft.
        """
        if length < 1:
            raise ValueError(f"draft length {length} must be at least 1")
        return cls(tuple(range(-1, length)), start_layer)

    @property
    def size(self) -> int:
        """Rows of a round, the root included (n)."""
        return len(self.parent)

    @cached_property
    def offset(self) -> np.ndarray:
        """Depth of each row, hence its position relative to the root's: `int[n]`."""
        depth = np.zeros(self.size, np.int32)
        for row, parent in enumerate(self.parent[1:], start=1):
            depth[row] = depth[parent] + 1
        return depth

    @cached_property
    def mask(self) -> np.ndarray:
        """Which rows a row may read: its ancestors and itself, `bool[n, n]`."""
        mask = np.eye(self.size, dtype=bool)
        for row, parent in enumerate(self.parent[1:], start=1):
            mask[row] |= mask[parent]
        return mask

    @cached_property
    def path(self) -> np.ndarray:
        """Rows from the root to each row, in order, then padding: `int[n, n]`."""
        path = np.zeros((self.size, self.size), np.int32)
        for row in range(self.size):
            ancestors = np.flatnonzero(self.mask[row])
            path[row, : len(ancestors)] = ancestors
        return path

    @property
    def is_chain(self) -> bool:
        """Whether accepted rows already lie in contiguous slots."""
        return self.parent == tuple(range(-1, self.size - 1))


@struct.dataclass
class Proposal:
    """What a drafter proposes.

    Attributes:
      tokens: `int32[B, n]`; row 0 is the root.
      valid: `bool[B, n]`; an invalid row is never accepted, nor are its descendants.
      hidden: states at the layout's start layer, `[B, n, D]`; None when it is 0.
    """

    tokens: jax.Array
    valid: jax.Array
    hidden: jax.Array | None = None


@struct.dataclass
class Context:
    """What a drafter may look at.

    Attributes:
      history: `int32[B, S]`, garbage behind `length`.
      length: `int32[B]`, tokens in the history; the last one is the root.
      root: `int32[B]`.
      cache: holds the positions before the root; its scratch slots may be written.
      sampling: adding the model's own noise to draft logits raises acceptance.
    """

    history: jax.Array
    length: jax.Array
    root: jax.Array
    cache: KVCache
    sampling: Sampling


@struct.dataclass
class Outcome:
    """What verification found, for the drafter's own state.

    Attributes:
      hidden: normalised final states of the round's rows, `[B, n, D]`.
      path: rows that were kept, in order, root first; `int32[B, n]`.
      count: how many of them count, `int32[B]`; 0 for a row that was done before.
    """

    hidden: jax.Array
    path: jax.Array
    count: jax.Array


class Drafter(Protocol):
    """A drafter: hashable, static, with pure methods. `params` holds "model" and
    whatever the drafter was given beside it.
    """

    @property
    def layout(self) -> Layout:
        """The fixed layout of its rounds."""

    def init(self, params: dict, hidden_BD: jax.Array) -> Any:
        """Its state after prefill.

        Args:
          params: see above.
          hidden_BD: normalised final state of the token before the root.
        """

    def propose(
        self, params: dict, state: Any, context: Context
    ) -> tuple[Proposal, Any, KVCache]:
        """Drafts one round."""

    def update(self, params: dict, state: Any, outcome: Outcome) -> Any:
        """Its state after a round."""


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


@struct.dataclass
class SpeculativeState:
    """State of the draft-verify loop."""

    decode: DecodeState
    drafter: Any
    trace: Trace


def start(
    drafter: Drafter, params: dict, state: DecodeState, hidden_BD: jax.Array
) -> SpeculativeState:
    """State of the loop after prefill; `hidden_BD` as `plain.prefill` returns it."""
    zeros = [jnp.zeros_like(state.history) for _ in range(3)]
    trace = Trace(*zeros, jnp.zeros_like(state.cache.length))
    return SpeculativeState(state, drafter.init(params, hidden_BD), trace)


@functools.partial(
    compilation.jit,
    static_argnames=("config", "drafter", "rows"),
    donate_argnames=("state",),
)
def speculate(
    config: ModelConfig,
    drafter: Drafter,
    params: dict,
    state: SpeculativeState,
    rounds: jax.Array,
    rows: int,
) -> SpeculativeState:
    """Runs rounds until every row is done or `rounds` of them have run.

    Args:
      config: the model.
      drafter: static.
      params: `{"model": ..., and what the drafter reads}`.
      state: donated.
      rounds: `int32[]`.
      rows: rows of a pass that verifies no draft (see `plain.decode`).
    """

    def unfinished(carry):
        state, done_rounds = carry
        return (done_rounds < rounds) & ~jnp.all(state.decode.done)

    def step(carry):
        state, done_rounds = carry
        return _round(config, drafter, params, state, rows), done_rounds + 1

    return lax.while_loop(unfinished, step, (state, jnp.int32(0)))[0]


def _round(
    config: ModelConfig,
    drafter: Drafter,
    params: dict,
    state: SpeculativeState,
    rows: int,
) -> SpeculativeState:
    layout, decode = drafter.layout, state.decode
    context = Context(
        decode.history, decode.length, decode.root, decode.cache, decode.sampling
    )
    proposal, drafter_state, cache = drafter.propose(params, state.drafter, context)
    verified = _verify(
        config, layout, params["model"], decode.replace(cache=cache), proposal, rows
    )
    target_Bn, cache = verified.target, verified.cache
    best_B, accepted_B = accept(layout, proposal, target_Bn)
    path_Bn = jnp.asarray(layout.path)[best_B]
    if not layout.is_chain:
        cache = cache.commit_path(path_Bn)
    # An accepted draft is the choice behind its parent, so the choices along the path
    # are the drafts and then the model's own token.
    emitted = (
        jnp.take_along_axis(found, path_Bn, axis=1)
        for found in (target_Bn, verified.scores)
    )
    next_state, count_B = plain.emit(
        decode.replace(cache=cache), *emitted, accepted_B + 1
    )
    outcome = Outcome(verified.hidden, path_Bn, count_B)
    depth_B = jnp.max(jnp.where(proposal.valid, layout.offset, 0), axis=-1)
    return SpeculativeState(
        next_state,
        drafter.update(params, drafter_state, outcome),
        _record(state.trace, depth_B, accepted_B, count_B),
    )


@struct.dataclass
class _Verified:
    """What a pass found behind each row; zero in rows that were not run.

    Attributes:
      hidden: normalised final states `[B, n, D]`.
      target: the model's choices `int32[B, n]`.
      scores: their log-probabilities, where asked for, `f32[B, n]`.
      cache: the rows' keys and values are in its scratch slots.
    """

    hidden: jax.Array
    target: jax.Array
    scores: jax.Array
    cache: KVCache


def _verify(
    config: ModelConfig,
    layout: Layout,
    params: dict,
    state: DecodeState,
    proposal: Proposal,
    rows: int,
) -> _Verified:
    """Scores the proposal; only as many rows as it needs, of two compiled widths."""
    n, (B, _) = layout.size, proposal.tokens.shape
    empty = _Verified(
        jnp.zeros((B, n, config.width), params["embed"].dtype),
        jnp.zeros((B, n), jnp.int32),
        jnp.zeros((B, n)),
        state.cache,
    )

    def run(w: int, carry: _Verified) -> _Verified:
        tokens_Bw = proposal.tokens[:, :w]
        place = layout.offset[:w], layout.mask[:w, :w]
        hidden_BwD, logits_BwV, cache = plain.score(
            config,
            params,
            carry.cache,
            tokens_Bw,
            *place,
            None if proposal.hidden is None else proposal.hidden[:, :w],
            layout.start_layer,
        )
        target_Bw, scores_Bw = plain.choose_next(state, logits_BwV, tokens_Bw, *place)
        return _Verified(
            carry.hidden.at[:, :w].set(hidden_BwD),
            carry.target.at[:, :w].set(target_Bw),
            carry.scores.at[:, :w].set(scores_Bw),
            cache,
        )

    if rows >= n:
        return run(n, empty)
    # A round without drafts costs a plain step, not a wide one; prompt lookup lives
    # on that. Both widths are in the one program, so nothing recompiles.
    drafted = jnp.any(proposal.valid[:, rows:])
    carry = run_if(~drafted, functools.partial(run, rows), empty)
    return run_if(drafted, functools.partial(run, n), carry)


def run_if(condition: jax.Array, function: Callable, carry):
    """`function(carry)` if the condition holds, else `carry`, without copying it.

    A loop of at most one turn updates its carry in place, where XLA's conditional
    copies every cache buffer into and out of its branches.
    """
    return lax.while_loop(
        lambda turn: turn[0],
        lambda turn: (jnp.zeros_like(condition), function(turn[1])),
        (condition, carry),
    )[1]


def accept(
    layout: Layout, proposal: Proposal, target_Bn: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Finds the deepest accepted row.

    A row is accepted iff it is valid, its parent is accepted, and its token is what
    the model chose after its parent.

    Returns:
      The deepest accepted row (the first of equals) and its depth, both `int32[B]`.
    """
    accepted = [jnp.ones_like(proposal.valid[:, 0])]
    for row, parent in enumerate(layout.parent[1:], start=1):
        agrees_B = proposal.tokens[:, row] == target_Bn[:, parent]
        accepted.append(accepted[parent] & proposal.valid[:, row] & agrees_B)
    depth_Bn = jnp.where(jnp.stack(accepted, axis=-1), layout.offset, -1)
    return jnp.argmax(depth_Bn, axis=-1), jnp.max(depth_Bn, axis=-1)


def _record(trace: Trace, proposed_B, accepted_B, count_B) -> Trace:
    """Writes one round's counts for the rows that were active in it."""
    row_B, slot_B = jnp.arange(len(count_B)), trace.rounds
    active_B = (count_B > 0).astype(jnp.int32)
    return Trace(
        trace.proposed.at[row_B, slot_B].set(proposed_B * active_B),
        trace.accepted.at[row_B, slot_B].set(accepted_B * active_B),
        trace.committed.at[row_B, slot_B].set(count_B),
        trace.rounds + active_B,
    )

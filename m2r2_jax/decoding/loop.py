"""The one decoding loop: rounds `state -> state` of drafting, verifying, emitting.

A round: the drafter proposes a fixed layout of rows behind the root, the model scores
them in one pass, the longest agreeing path is emitted together with the model's own
next token, and the cache is advanced by exactly that. A draft is accepted iff it
equals the token the model chooses at that position, greedy or sampled with shared
noise, so the output is the model's own, whatever the drafter says. Plain decoding is
the loop whose drafter proposes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from m2r2_jax.decoding import passes
from m2r2_jax.decoding.drafting import Context, Drafter, Layout, Outcome, Proposal
from m2r2_jax.decoding.state import DecodeState, emit
from m2r2_jax.models.cache import KVCache
from m2r2_jax.models.config import Decoder
from m2r2_jax.ops import compilation


@functools.partial(
    compilation.jit,
    static_argnames=("decoder", "drafter"),
    donate_argnames=("state",),
)
def decode(
    decoder: Decoder,
    drafter: Drafter,
    params: dict,
    state: DecodeState,
    rounds: jax.Array,
) -> DecodeState:
    """Runs rounds until every row is done or `rounds` of them have run.

    Args:
      decoder: the model, and how it runs.
      drafter: static.
      params: `{"model": ..., and what the drafter reads}`; an argument, not a constant,
        so that programs are shared between models.
      state: donated.
      rounds: `int32[]`, passes of the full model; streaming calls in chunks.
    """

    def unfinished(carry):
        state, done_rounds = carry
        return (done_rounds < rounds) & ~jnp.all(state.done)

    def step(carry):
        state, done_rounds = carry
        return round_of(decoder, drafter, params, state), done_rounds + 1

    return lax.while_loop(unfinished, step, (state, jnp.int32(0)))[0]


def round_of(
    decoder: Decoder, drafter: Drafter, params: dict, state: DecodeState
) -> DecodeState:
    """One round of every row."""
    context = Context(
        state.history, state.length, state.root, state.cache, state.sampling
    )
    proposal, drafter_state, cache = drafter.propose(
        decoder, params, state.drafter, context
    )
    least = decoder.execution.least_rows
    layout, proposal = drafter.layout.at_least(least), proposal.at_least(least)
    place = layout, drafter.start_layer
    verified = _verify(
        decoder, place, params["model"], state.replace(cache=cache), proposal
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
    state, count_B = emit(state.replace(cache=cache), *emitted, accepted_B + 1)
    outcome = Outcome(verified.hidden, path_Bn, count_B)
    depth_B = jnp.max(jnp.where(proposal.valid, layout.offset, 0), axis=-1)
    return state.replace(
        drafter=drafter.update(decoder, params, drafter_state, outcome),
        trace=state.trace.record(depth_B, accepted_B, count_B),
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
    decoder: Decoder,
    place: tuple[Layout, int],
    params: dict,
    state: DecodeState,
    proposal: Proposal,
) -> _Verified:
    """Scores the proposal; only as many rows as it needs, of two compiled widths."""
    layout, start_layer = place
    n, (B, _) = layout.size, proposal.tokens.shape
    empty = _Verified(
        jnp.zeros((B, n, decoder.config.width), params["embed"].dtype),
        jnp.zeros((B, n), jnp.int32),
        jnp.zeros((B, n), jnp.float32),
        state.cache,
    )

    def run(w: int, carry: _Verified) -> _Verified:
        tokens_Bw = proposal.tokens[:, :w]
        place = layout.offset[:w], layout.mask[:w, :w]
        hidden_BwD, logits_BwV, cache = passes.score(
            decoder,
            params,
            carry.cache,
            tokens_Bw,
            *place,
            None if proposal.hidden is None else proposal.hidden[:, :w],
            start_layer,
        )
        target_Bw, scores_Bw = passes.choose_next(state, logits_BwV, tokens_Bw, *place)
        return _Verified(
            carry.hidden.at[:, :w].set(hidden_BwD),
            carry.target.at[:, :w].set(target_Bw),
            carry.scores.at[:, :w].set(scores_Bw),
            cache,
        )

    least = decoder.execution.least_rows
    if least >= n:
        return run(n, empty)
    # A round without drafts costs a plain step, not a wide one; prompt lookup lives
    # on that. Both widths are in the one program, so nothing recompiles.
    drafted = jnp.any(proposal.valid[:, least:])
    carry = run_if(~drafted, functools.partial(run, least), empty)
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

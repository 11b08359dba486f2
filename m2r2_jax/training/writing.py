"""A model writes its own training text: prompts and answers, in large batches.

One jitted loop `state -> state` decodes many conversations side by side. A row whose
conversation has ended stores it and takes the next one at once, without the host: the
chat template's opening is the same for all of them and stays in the row's cache, so a
row starts over by setting its length back. A conversation is a function of the
settings and its number, whatever its neighbours are; the number of rows is one of the
settings, since sums round differently with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from m2r2_jax.checkpoints.model import Model
from m2r2_jax.decoding import passes
from m2r2_jax.models.config import Decoder
from m2r2_jax.models.layers import argmax
from m2r2_jax.ops import compilation
from m2r2_jax.training.exchanges import Conversation, Frame, Labels
from m2r2_jax.training.inverse_cdf import inverse_cdf
from m2r2_jax.training.writing_state import WritingConfig, WritingState, start

LOOP_NGRAM = 8  # A turn has run into a loop at the third appearance of such a run.


@functools.partial(
    compilation.jit,
    static_argnames=("decoder", "frame", "config"),
    donate_argnames=("state",),
)
def write(
    decoder: Decoder,
    params: dict,
    frame: Frame,
    config: WritingConfig,
    eos_E: jax.Array,
    first: jax.Array,
    state: WritingState,
    steps: jax.Array,
) -> WritingState:
    """Writes on for at most `steps` steps, or until every conversation has ended.

    Args:
      decoder: the model, and how it runs.
      params: its parameters.
      frame: from `exchanges.chat_frame`.
      config: as for `start`.
      eos_E: ids that end a turn.
      first: `int32[]`, number of the first conversation among all: seeds count on.
      state: donated.
      steps: `int32[]`.
    """

    def unfinished(turn):
        state, step = turn
        return (step < steps) & ~state.done

    def step(turn):
        state, step = turn
        return _step(decoder, params, frame, config, eos_E, first, state), step + 1

    return lax.while_loop(unfinished, step, (state, jnp.int32(0)))[0]


def _step(decoder, params, frame, config, eos_E, first, state) -> WritingState:
    """One token for every row; ended conversations are stored and replaced."""
    length_B = state.cache.length + 1
    root_B1 = jnp.take_along_axis(state.history, length_B[:, None] - 1, axis=1)
    state_B1D, logits_B1V, cache = passes.score(
        decoder,
        params,
        state.cache,
        root_B1,
        np.zeros(1, np.int32),
        np.ones((1, 1), bool),
    )
    logits_BV = logits_B1V[:, 0]
    best_B = argmax(logits_BV)
    kept = state.kept
    if kept is not None:
        kept = kept.put(state.index, length_B - 1, state_B1D[:, 0], best_B)
    number_B = first + state.index
    chosen_B = _choose(config, logits_BV, best_B, state, number_B, length_B)
    token_B, answer_start_B, is_frame_B = _next_token(
        frame, config, eos_E, state, chosen_B, length_B
    )
    row_B = jnp.arange(config.rows)
    active_B = state.index < len(state.given)
    state = state.replace(
        cache=cache.advance(jnp.ones_like(length_B)),
        history=state.history.at[row_B, length_B].set(token_B),
        answer_start=answer_start_B,
        tokens=state.tokens + jnp.sum(active_B & ~is_frame_B),
        kept=kept,
    )
    in_answer_B = (answer_start_B > 0) & (length_B >= answer_start_B)
    ended_B = in_answer_B & jnp.any(token_B[:, None] == eos_E, axis=-1)
    cut_B = length_B + 1 - answer_start_B >= config.max_answer_tokens
    cut_B |= _repeats(state.history, length_B + 1, answer_start_B)
    return _start_over(frame, state, ended_B, in_answer_B & (ended_B | cut_B))


def _next_token(frame, config, eos_E, state, chosen_B, length_B):
    """The token each row gets: chosen by the model, given, or the template's.

    Returns:
      The token, where the row's answer starts, whether the token is the template's.
    """
    turn_B = length_B - len(frame.opening)
    slot_B1 = jnp.clip(turn_B, 0, config.max_prompt_tokens - 1)[:, None]
    conversation_B = jnp.minimum(state.index, len(state.given) - 1)
    given_length_B = state.given_length[conversation_B]
    given_B = jnp.take_along_axis(state.given[conversation_B], slot_B1, axis=1)[:, 0]
    in_turn_B = state.answer_start == 0
    is_given_B = in_turn_B & (turn_B < given_length_B)
    ends_B = jnp.any(chosen_B[:, None] == eos_E, axis=-1)
    ends_B = jnp.where(given_length_B > 0, turn_B >= given_length_B, ends_B)
    ends_B |= turn_B >= config.max_prompt_tokens
    answer_start_B = jnp.where(
        in_turn_B & ends_B, length_B + len(frame.bridge), state.answer_start
    )
    left_B = answer_start_B - length_B
    is_bridge_B = left_B > 0
    bridge_B = jnp.asarray(frame.bridge)[jnp.clip(-left_B, -len(frame.bridge), -1)]
    token_B = jnp.where(is_given_B, given_B, chosen_B)
    token_B = jnp.where(is_bridge_B, bridge_B, token_B)
    return token_B.astype(jnp.int32), answer_start_B, is_bridge_B


def _choose(config, logits_BV, best_B, state, number_B, length_B) -> jax.Array:
    """The model's own choice: user turns sampled, answers mostly greedy."""
    in_answer_B = state.answer_start > 0
    greedy_B = in_answer_B & (number_B % config.sampled_every != 0)
    scale_B = jnp.where(in_answer_B, config.answer_temperature, 1.0)
    key = jax.random.key(config.seed)

    def uniform(number, position):
        one = jax.random.fold_in(jax.random.fold_in(key, number), position)
        return jax.random.uniform(one)

    uniform_B = jax.vmap(uniform)(number_B, length_B)
    sampled_B = inverse_cdf(logits_BV / scale_B[:, None], uniform_B)
    return jnp.where(greedy_B, best_B, sampled_B)


def _repeats(history_BS, length_B, answer_start_B) -> jax.Array:
    """Whether the last n-gram of the answer stands in it for the third time."""
    S = history_BS.shape[1]
    same_BS = jnp.ones(history_BS.shape, jnp.bool_)
    for back in range(LOOP_NGRAM):
        last_B1 = jnp.maximum(length_B - 1 - back, 0)[:, None]
        token_B1 = jnp.take_along_axis(history_BS, last_B1, axis=1)
        same_BS &= jnp.roll(history_BS, back, axis=1) == token_B1
    end_S = jnp.arange(S)
    first_B1 = (answer_start_B + LOOP_NGRAM - 1)[:, None]
    inside_BS = (end_S >= first_B1) & (end_S < length_B[:, None])
    return jnp.sum(same_BS & inside_BS, axis=-1) >= 3


def _start_over(frame, state, ended_B, over_B) -> WritingState:
    """Stores the conversations that are over and gives their rows the next ones."""
    count = len(state.given)
    target_B = jnp.where(over_B, state.index, count)  # Out of range: dropped.
    length_B = state.cache.length + 1
    ends_B3 = jnp.stack([state.answer_start, length_B, ended_B], axis=-1)
    taken_B = state.next_index + jnp.cumsum(over_B) - 1
    opening = len(frame.opening)
    return state.replace(
        written=state.written.at[target_B].set(state.history, mode="drop"),
        ends=state.ends.at[target_B].set(ends_B3.astype(jnp.int32), mode="drop"),
        index=jnp.where(over_B, jnp.minimum(taken_B, count), state.index),
        next_index=jnp.minimum(state.next_index + jnp.sum(over_B), count),
        answer_start=jnp.where(over_B, 0, state.answer_start),
        cache=state.cache.replace(
            length=jnp.where(over_B, opening - 1, state.cache.length)
        ),
    )


def write_all(
    model: Model,
    frame: Frame,
    config: WritingConfig,
    count: int,
    first: int = 0,
    prompts: Sequence[Sequence[int]] = (),
    *,
    keep: bool = False,
    steps: int = 32,
    watch: Callable[[WritingState], None] = lambda state: None,
) -> list[Conversation]:
    """Conversations `first` .. `first + count - 1`, from start to end.

    Args:
      model: from `load`.
      frame: from `exchanges.chat_frame`.
      config: how to write.
      count: N.
      first: number of the first conversation: randomness counts on from it.
      prompts: N user turns, or none to have them written too.
      keep: whether the conversations come with labels.
      steps: how often the state is shown to `watch`; changes no text.
      watch: shown the state on the way; must not keep it, it is donated.

    Raises:
      ValueError: as `start`.
    """
    state = start(model, frame, config, count, prompts, keep)
    eos = jnp.asarray(sorted(model.tokenizer.eos_ids), jnp.int32)
    while not bool(state.done):
        state = write(
            model.decoder,
            model.params,
            frame,
            config,
            eos,
            jnp.int32(first),
            state,
            jnp.int32(steps),
        )
        watch(state)
    return collect(frame, state)


def collect(frame: Frame, state: WritingState) -> list[Conversation]:
    """The conversations of a state that is done, in order."""
    written, ends, kept = jax.device_get((state.written, state.ends, state.kept))
    opening, bridge = len(frame.opening), len(frame.bridge)
    conversations = []
    for row, (answer_start, length, finished) in enumerate(ends):
        prompt = written[row, opening : answer_start - bridge]
        answer = written[row, answer_start:length]
        read = (row, slice(opening, length - 1))
        labels = None
        if kept is not None:
            states = kept.states[read].view(ml_dtypes.bfloat16)
            labels = Labels(states, kept.argmax[read])
        conversations.append(
            Conversation(prompt.tolist(), answer.tolist(), bool(finished), labels)
        )
    return conversations

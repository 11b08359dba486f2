"""What the writing loop carries, and how it begins."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from m2r2_jax.checkpoints.model import Model
from m2r2_jax.decoding import passes
from m2r2_jax.models import sharding
from m2r2_jax.models.cache import KVCache, init_cache
from m2r2_jax.training.exchanges import Frame


@dataclasses.dataclass(frozen=True)
class WritingConfig:
    """How conversations are written.

    Attributes:
      rows: conversations decoded side by side (B).
      max_prompt_tokens: a user turn is cut there.
      max_answer_tokens: an answer is cut there.
      sampled_every: one answer in so many is sampled, the others are greedy.
      answer_temperature: of the sampled answers; user turns are sampled at 1.
      seed: of all randomness.
    """

    rows: int = 128
    max_prompt_tokens: int = 64
    max_answer_tokens: int = 160
    sampled_every: int = 4
    answer_temperature: float = 0.8
    seed: int = 0

    def __post_init__(self):
        for name in ("rows", "max_prompt_tokens", "max_answer_tokens", "sampled_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        if not self.answer_temperature > 0:
            raise ValueError(
                f"answer_temperature {self.answer_temperature} must be positive; for "
                "greedy answers only, make sampled_every larger than the count"
            )


@struct.dataclass
class Kept:
    """What the model thought behind each token it read, by conversation.

    Attributes:
      states: `uint16[N, S, D]`, the bits of normalised final states in bf16: XLA's CPU
        backend turns a whole bf16 array to f32 and back to write a few of its rows.
      argmax: `int32[N, S]`.
    """

    states: jax.Array
    argmax: jax.Array

    @classmethod
    def empty(cls, count: int, capacity: int, width: int) -> Kept:
        states = jnp.zeros((count, capacity, width), jnp.uint16)
        return cls(states, jnp.zeros((count, capacity), jnp.int32))

    def put(self, index_B, position_B, state_BD, argmax_B) -> Kept:
        """Keeps a token's labels of each row; idle rows have an index out of range."""
        at = (index_B, position_B)
        bits_BD = lax.bitcast_convert_type(state_BD.astype(jnp.bfloat16), jnp.uint16)
        return Kept(
            self.states.at[at].set(bits_BD, mode="drop"),
            self.argmax.at[at].set(argmax_B.astype(jnp.int32), mode="drop"),
        )


@struct.dataclass
class WritingState:
    """Everything the loop carries: B rows at work on N conversations.

    Attributes:
      cache: holds `length - 1` positions of each row.
      history: `int32[B, S]`, the rows' tokens from the opening on.
      index: `int32[B]`, the conversation a row is at; N for an idle row.
      answer_start: `int32[B]`, where the answer begins; 0 while the user's turn is on.
      next_index: `int32[]`, the first conversation nobody has taken.
      given: `int32[N, U]` user turns that were given; unread behind `given_length`.
      given_length: `int32[N]`; 0 where the model writes the user's turn itself.
      written: `int32[N, S]`, tokens of ended conversations.
      ends: `int32[N, 3]`, for each: answer start, length, 1 if it ended by itself.
      tokens: `int32[]`, tokens chosen or given so far, the template's left out.
      kept: labels of the conversations, or None where they are not asked for.
    """

    cache: KVCache
    history: jax.Array
    index: jax.Array
    answer_start: jax.Array
    next_index: jax.Array
    given: jax.Array
    given_length: jax.Array
    written: jax.Array
    ends: jax.Array
    tokens: jax.Array
    kept: Kept | None

    @property
    def done(self) -> jax.Array:
        """Whether every conversation has ended."""
        return jnp.all(self.index >= len(self.given))


def start(
    model: Model,
    frame: Frame,
    config: WritingConfig,
    count: int,
    prompts: Sequence[Sequence[int]] = (),
    keep: bool = False,
) -> WritingState:
    """The state before the first token of `count` conversations.

    Args:
      model: from `load`.
      frame: from `exchanges.chat_frame`.
      config: how to write.
      count: N.
      prompts: N user turns, or none to have them written too.
      keep: whether labels are kept, 2 D bytes for each of N * S tokens.

    Raises:
      ValueError: a prompt is longer than `max_prompt_tokens`, or the context is short.
    """
    longest = max((len(p) for p in prompts), default=0)
    if longest > config.max_prompt_tokens:
        where = max(range(len(prompts)), key=lambda i: len(prompts[i]))
        raise ValueError(
            f"prompt {where} has {longest} tokens, max_prompt_tokens is "
            f"{config.max_prompt_tokens}; raise it or leave the prompt out"
        )
    capacity = _capacity(frame, config)
    if capacity > model.config.context_length:
        raise ValueError(
            f"a conversation may take {capacity} tokens, the context holds "
            f"{model.config.context_length}; lower max_prompt_tokens or "
            "max_answer_tokens"
        )
    given = np.zeros((count, config.max_prompt_tokens), np.int32)
    for row, prompt in enumerate(prompts):
        given[row, : len(prompt)] = prompt
    given_length = np.array([len(p) for p in prompts] or [0] * count, np.int32)
    B = config.rows
    history = np.zeros((B, capacity), np.int32)
    history[:, : len(frame.opening)] = frame.opening
    index = np.minimum(np.arange(B), count).astype(np.int32)

    return WritingState(
        cache=_opened_cache(model, frame, model.place(history)),
        history=model.place(history),
        index=model.place(index),
        answer_start=model.place(np.zeros(B, np.int32)),
        next_index=jnp.int32(min(B, count)),
        given=jnp.asarray(given),
        given_length=jnp.asarray(given_length),
        written=jnp.zeros((count, capacity), jnp.int32),
        ends=jnp.zeros((count, 3), jnp.int32),
        tokens=jnp.int32(0),
        kept=Kept.empty(count, capacity, model.config.width) if keep else None,
    )


def _capacity(frame: Frame, config: WritingConfig) -> int:
    around = len(frame.opening) + len(frame.bridge)
    return around + config.max_prompt_tokens + config.max_answer_tokens


def _opened_cache(model: Model, frame: Frame, history: jax.Array) -> KVCache:
    """A cache whose rows all hold the opening but its last token."""
    B, capacity = history.shape
    opening = len(frame.opening) - 1
    cache = jax.jit(
        functools.partial(
            init_cache,
            model.config,
            B,
            capacity,
            model.stream_dtype,
            unrolled=model.unrolled,
        )
    )()
    if model.mesh is not None:
        cache = jax.device_put(cache, sharding.cache_shardings(model.mesh, cache))
    hidden = jnp.zeros((B, model.config.width), model.stream_dtype)
    count = jnp.full((B,), opening, jnp.int32)
    tokens = history[:, :opening]
    return passes.prefill(model.decoder, model.params, cache, hidden, tokens, count)[0]

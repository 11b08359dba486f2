"""A session: prompts in, answers out, the cache kept from one turn to the next."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from m2r2_jax import decoding, sharding, speculative
from m2r2_jax.cache import KVCache, grow, init_cache
from m2r2_jax.decoding import DecodeState, Sampling
from m2r2_jax.methods import Method
from m2r2_jax.model import Model

_SLOT_STEP = 256  # Caches grow in these steps, so that shapes are few.
_NO_STEP_LIMIT = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one row of a run produced.

    Attributes:
      token_ids: emitted ids, the ending one included.
      finish_reason: "stop" at an end-of-sequence id, "length" at the limit.
      proposed: drafts proposed in each round (empty for plain decoding).
      accepted: drafts accepted in each round, before any cut.
      committed: tokens emitted in each round.
    """

    token_ids: list[int]
    finish_reason: str
    proposed: list[int] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    committed: list[int] = dataclasses.field(default_factory=list)

    @property
    def tau(self) -> float | None:
        """Tokens per pass of the full model, its own token included; None if none."""
        return len(self.token_ids) / len(self.committed) if self.committed else None


@dataclasses.dataclass(frozen=True)
class Timing:
    """Wall-clock seconds of one run, compilation included where it happened."""

    prefill_seconds: float
    decode_seconds: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a run will go; runs with equal chunks and capacity share their programs.

    Attributes:
      kept: cached positions that are reused, per row.
      limits: length at which each row stops at the latest.
      chunks: padded sizes of the prefill calls.
      capacity: slots of the cache.
    """

    kept: tuple[int, ...]
    limits: tuple[int, ...]
    chunks: tuple[int, ...]
    capacity: int


class Session:
    """Decodes a fixed number of conversations together, with one method.

    Each run's prompt is the whole conversation so far; what it shares with the tokens
    already in the cache is not computed again.
    """

    def __init__(self, model: Model, method: Method, batch: int = 1):
        """Creates an empty session.

        Args:
          model: from `load`.
          method: from `build_method`.
          batch: conversations (B), a multiple of the mesh's data axis.

        Raises:
          ValueError: the mesh cannot hold the batch.
        """
        shards = sharding.batch_size(model.mesh)
        if batch % shards:
            raise ValueError(
                f"batch {batch} does not fill the mesh's data axis of {shards}; use a "
                f"multiple of {shards}"
            )
        self.model = model.exact if method.rows > 1 else model
        self.method, self.batch = method, batch
        self._cache: KVCache | None = None
        self._cached_ids: list[list[int]] = [[] for _ in range(batch)]

    @property
    def cached_ids(self) -> list[list[int]]:
        """The tokens whose keys and values are in the cache, per row."""
        return [list(ids) for ids in self._cached_ids]

    def plan(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Plan:
        """What a run of these prompts would reuse, prefill and allocate.

        Raises:
          ValueError: as `run`.
        """
        self._validate_prompts(prompts, max_new_tokens)
        lengths = [len(prompt) for prompt in prompts]
        context = self.model.config.context_length
        limits = [min(length + max_new_tokens, context) for length in lengths]
        # At least the last cached position is run again: drafters want its state.
        kept = [
            max(0, min(_common_prefix(prompt, cached), len(prompt) - 2))
            for prompt, cached in zip(prompts, self._cached_ids, strict=True)
        ]
        longest = max(len(p) - 1 - k for p, k in zip(prompts, kept, strict=True))
        chunks = decoding.chunk_sizes(longest)
        needed = max(max(kept) + sum(chunks), max(limits) + self._rows_per_pass)
        capacity = -(-needed // _SLOT_STEP) * _SLOT_STEP
        if self._cache is not None:
            capacity = max(capacity, self._cache.capacity)
        return Plan(tuple(kept), tuple(limits), tuple(chunks), capacity)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forgets what is cached behind the first `length` tokens of each row."""
        self._cached_ids = [
            ids[:length] for ids, length in zip(self._cached_ids, lengths, strict=True)
        ]

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        eos_ids: frozenset[int] | None = None,
        max_steps: int = _NO_STEP_LIMIT,
    ) -> tuple[list[Answer], Timing]:
        """Answers one prompt per row.

        Args:
          prompts: B lists of token ids, none empty.
          max_new_tokens: at most this many ids per row; fewer where the context ends.
          temperature: 0 is greedy.
          seed: of the sampling noise.
          eos_ids: ids that end an answer; the tokenizer's by default, may be empty.
          max_steps: stop after this many passes of the full model; one pass compiles
            everything that a whole run needs.

        Raises:
          ValueError: for a prompt that is empty or does not fit the context, or a
            setting out of range; nothing has run then.
        """
        if not temperature >= 0:
            raise ValueError(f"temperature {temperature} must be 0 (greedy) or more")
        if not -(2**31) <= seed < 2**31:
            raise ValueError(f"seed {seed} does not fit 32 bits; choose 0..{2**31 - 1}")
        plan = self.plan(prompts, max_new_tokens)
        eos_ids = self.model.tokenizer.eos_ids if eos_ids is None else eos_ids
        started = time.perf_counter()
        cache, hidden = self._prefill(prompts, plan)
        prefilled = time.perf_counter()
        sampling = Sampling(
            self._place(np.full(self.batch, temperature, np.float32)),
            self._place(np.full(self.batch, seed, np.int32)),
        )
        state = self._state(cache, prompts, plan.limits, sampling, eos_ids)
        state, trace = self._decode(state, hidden, np.int32(max_steps))
        answers = self._collect(state, trace, prompts, eos_ids)
        ended = time.perf_counter()
        self._cache = state.cache
        self._cached_ids = [
            [*prompt, *answer.token_ids][:-1]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return answers, Timing(prefilled - started, ended - prefilled)

    def _validate_prompts(self, prompts, max_new_tokens: int) -> None:
        if len(prompts) != self.batch:
            raise ValueError(
                f"{len(prompts)} prompts for a session of {self.batch} rows"
            )
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens {max_new_tokens} must not be negative")
        context = self.model.config.context_length
        vocab_size = self.model.config.vocab_size
        for row, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"prompt {row} is empty; give at least one token")
            if len(prompt) >= context:
                raise ValueError(
                    f"prompt {row} has {len(prompt)} tokens, the context holds "
                    f"{context} with at least one new token; shorten the prompt"
                )
            if min(prompt) < 0 or max(prompt) >= vocab_size:
                raise ValueError(
                    f"prompt {row} has ids from {min(prompt)} to {max(prompt)}; the "
                    f"vocabulary has 0..{vocab_size - 1}"
                )

    def _prefill(self, prompts, plan: Plan) -> tuple[KVCache, jax.Array]:
        """Brings the cache to every position before each prompt's last token."""
        model = self.model
        position = np.array(plan.kept)
        ends = np.array([len(prompt) - 1 for prompt in prompts])
        cache = self._take_cache(plan.capacity, position)
        dtype = model.params["embed"].dtype
        hidden = self._place(np.zeros((self.batch, model.config.width), dtype))
        for size in plan.chunks:
            count = np.clip(ends - position, 0, size)
            tokens = np.zeros((self.batch, size), np.int32)
            for row, prompt in enumerate(prompts):
                chunk = prompt[position[row] : position[row] + count[row]]
                tokens[row, : count[row]] = chunk
            placed = self._place(tokens), self._place(count.astype(np.int32))
            cache, hidden = decoding.prefill(
                model.config, model.params, cache, hidden, *placed
            )
            position = position + count
        return jax.block_until_ready((cache, hidden))

    @property
    def _rows_per_pass(self) -> int:
        """Rows that one pass may write behind the committed positions."""
        drafter = self.method.drafter
        return max(self.method.rows, drafter.layout.size if drafter else 1)

    def _take_cache(self, capacity: int, length: np.ndarray) -> KVCache:
        """The kept cache rolled back to `length`, or a new one; the session's own
        reference is dropped, since the cache will be donated.
        """
        cache, self._cache = self._cache, None
        # If this run is interrupted, the next one starts from an empty cache.
        self._cached_ids = [[] for _ in range(self.batch)]
        if cache is None:
            return _new_cache(self.model, self.batch, capacity)
        cache = grow(cache, capacity)
        return cache.replace(length=self._place(length.astype(np.int32)))

    def _place(self, array: np.ndarray) -> jax.Array:
        """Puts a batch-major host array on the device or over the mesh."""
        mesh = self.model.mesh
        if mesh is None:
            return jnp.asarray(array)
        return jax.device_put(array, sharding.batched(mesh, array))

    def _state(self, cache, prompts, limits, sampling, eos_ids) -> DecodeState:
        history = np.zeros((self.batch, cache.capacity), np.int32)
        for row, prompt in enumerate(prompts):
            history[row, : len(prompt)] = prompt
        limits = np.array(limits, np.int32)
        done = np.array([len(prompt) for prompt in prompts]) >= limits
        eos = jnp.asarray(sorted(eos_ids), jnp.int32)
        history, limits, done = map(self._place, (history, limits, done))
        return DecodeState(cache, history, limits, done, eos, sampling)

    def _decode(self, state: DecodeState, hidden: jax.Array, max_steps: np.int32):
        config, method = self.model.config, self.method
        if method.drafter is None:
            state = decoding.decode(
                config, self.model.params, state, max_steps, method.rows
            )
            return jax.block_until_ready(state), None
        params = {"model": self.model.params, **method.params}
        state = speculative.start(method.drafter, params, state, hidden)
        state = speculative.speculate(
            config, method.drafter, params, state, max_steps, method.rows
        )
        state = jax.block_until_ready(state)
        return state.decode, jax.device_get(state.trace)

    def _collect(self, state, trace, prompts, eos_ids) -> list[Answer]:
        history, ends = jax.device_get((state.history, state.length))
        answers = []
        for row in range(self.batch):
            ids = history[row, len(prompts[row]) : ends[row]].tolist()
            stopped = bool(ids) and ids[-1] in eos_ids
            reason = "stop" if stopped else "length"
            if trace is None:
                answers.append(Answer(ids, reason, committed=[1] * len(ids)))
                continue
            rounds = int(trace.rounds[row])
            counts = (trace.proposed, trace.accepted, trace.committed)
            answers.append(
                Answer(ids, reason, *(count[row, :rounds].tolist() for count in counts))
            )
        return answers


def _new_cache(model: Model, batch: int, capacity: int) -> KVCache:
    """An empty cache, born on its devices."""
    dtype = model.params["embed"].dtype
    return _cache_maker(
        model.config, model.mesh, batch, capacity, dtype, model.unrolled
    )()


@functools.cache
def _cache_maker(config, mesh, batch: int, capacity: int, dtype, unrolled: bool):
    """The function behind `_new_cache`; kept, or every session would compile it."""
    create = functools.partial(
        init_cache, config, batch, capacity, dtype, unrolled=unrolled
    )
    if mesh is None:
        return jax.jit(create)
    shardings = sharding.cache_shardings(mesh, jax.eval_shape(create))
    return jax.jit(create, out_shardings=shardings)


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))

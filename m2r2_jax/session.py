"""A session: prompts in, answers out, the cache kept from one turn to the next."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from m2r2_jax import decoding, sharding, speculative
from m2r2_jax.answers import Answer, StopStrings
from m2r2_jax.cache import KVCache, grow, init_cache
from m2r2_jax.decoding import DecodeState
from m2r2_jax.methods import Method
from m2r2_jax.model import Model
from m2r2_jax.requests import Request, make_request
from m2r2_jax.sampling import BROKEN, Adjustments, Sampling

_SLOT_STEP = 256  # Caches grow in these steps, so that shapes are few.
_NO_STEP_LIMIT = np.iinfo(np.int32).max
_CHUNK = 8  # Passes between two looks at the text, for streaming and stop strings.


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

    def plan(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        **settings,
    ) -> Plan:
        """What a run of this request would reuse, prefill and allocate.

        Raises:
          ValueError: as `run`.
        """
        request = make_request(
            self.model, self.batch, prompts, max_new_tokens, **settings
        )
        return self._plan(request)

    def _plan(self, request: Request) -> Plan:
        prompts = request.prompts
        # At least the last cached position is run again: drafters want its state.
        kept = [
            max(0, min(_common_prefix(prompt, cached), len(prompt) - 2))
            for prompt, cached in zip(prompts, self._cached_ids, strict=True)
        ]
        longest = max(len(p) - 1 - k for p, k in zip(prompts, kept, strict=True))
        chunks = decoding.chunk_sizes(longest)
        longest = max(request.limits) + self._rows_per_pass
        needed = max(max(kept) + sum(chunks), longest)
        capacity = -(-needed // _SLOT_STEP) * _SLOT_STEP
        if self._cache is not None:
            capacity = max(capacity, self._cache.capacity)
        return Plan(tuple(kept), tuple(request.limits), tuple(chunks), capacity)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forgets what is cached behind the first `length` tokens of each row."""
        self._cached_ids = [
            ids[:length] for ids, length in zip(self._cached_ids, lengths, strict=True)
        ]

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        *,
        max_steps: int = _NO_STEP_LIMIT,
        **settings,
    ) -> tuple[list[Answer], Timing]:
        """Answers one prompt per row.

        Args:
          prompts: B lists of token ids, none empty.
          max_new_tokens: at most this many ids, for all rows or for each.
          max_steps: stop after this many passes of the full model; one pass compiles
            everything that a whole run needs.
          **settings: of `requests.make_request`: `sampling`, `stop`, `logprobs`,
            `eos_ids`, `truncate`.

        Raises:
          ValueError: for a prompt that is empty or does not fit the context, or a
            setting out of range; nothing has run then.
          FloatingPointError: the model's logits hold a NaN.
        """
        request = make_request(
            self.model, self.batch, prompts, max_new_tokens, **settings
        )
        steps = min(max_steps, _CHUNK) if request.stop else max_steps
        started = time.perf_counter()
        with contextlib.closing(self._chunks(request, steps)) as chunks:
            answers = next(chunks)
            prefilled = time.perf_counter()
            for passes, answers in enumerate(chunks, start=1):  # noqa: B007
                if passes * steps >= max_steps:
                    break
        ended = time.perf_counter()
        return answers, Timing(prefilled - started, ended - prefilled)

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        *,
        steps: int = _CHUNK,
        **settings,
    ) -> Iterator[list[Answer]]:
        """As `run`, but gives the answers so far every few passes.

        Closing the generator early leaves the cache at what was given.

        Args:
          prompts: as for `run`.
          max_new_tokens: as for `run`.
          steps: passes of the full model between two looks.
          **settings: as for `run`.

        Raises:
          ValueError: as `run`, at once.
        """
        request = make_request(
            self.model, self.batch, prompts, max_new_tokens, **settings
        )
        if steps < 1:
            raise ValueError(f"steps {steps} must be at least 1")
        return self._chunks(request, steps)

    def _chunks(self, request: Request, steps: int) -> Iterator[list[Answer]]:
        """The answers after prefill, empty, and then every `steps` passes."""
        prompts, plan = request.prompts, self._plan(request)
        cache, hidden = self._prefill(prompts, plan)
        state = self._state(cache, request)
        if self.method.drafter is not None:
            state = speculative.start(self.method.drafter, self._params, state, hidden)
        watches = [
            StopStrings(self.model.tokenizer, request.stop, params.min_new_tokens)
            for params in request.sampling
        ]
        cut: dict[int, Answer] = {}
        answers = [Answer([], "length") for _ in prompts]
        try:
            yield answers
            while not all(self._done(state)):
                # Lost if the pass is interrupted, or broken.
                running, state = state, None
                running = self._advance(running, np.int32(steps))
                found = self._collect(running, request)
                state = running
                for row, watch in enumerate(watches if request.stop else ()):
                    seen = len(answers[row].token_ids)
                    if row in cut:
                        found[row] = cut[row]
                    elif where := watch.feed(found[row].token_ids[seen:]):
                        found[row] = cut[row] = found[row].cut(*where)
                state = self._end_rows(state, list(cut)) if cut else state
                answers = found
                yield answers
        finally:
            if state is not None:
                self._keep(state, prompts, answers)

    def _keep(self, state, prompts, answers: list[Answer]) -> None:
        """Keeps the cache for the next turn: all that was given but its last token."""
        self._cache = _decode_state(state).cache
        self._cached_ids = [
            [*prompt, *answer.token_ids][:-1]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

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

    def _state(self, cache: KVCache, request: Request) -> DecodeState:
        prompts, limits = request.prompts, request.limits
        lengths = np.array([len(prompt) for prompt in prompts])
        history = np.zeros((self.batch, cache.capacity), np.int32)
        for row, prompt in enumerate(prompts):
            history[row, : len(prompt)] = prompt
        rows = {
            "history": history,
            "limit": np.array(limits, np.int32),
            "done": lengths >= np.array(limits),
            "sampling": Sampling.stack(request.sampling),
            "adjustments": Adjustments.stack(request.sampling, lengths),
            "scores": np.zeros(history.shape, np.float32),
        }
        return DecodeState(
            cache=cache,
            eos=jnp.asarray(sorted(request.eos_ids), jnp.int32),
            scored=jnp.asarray(request.logprobs),
            **jax.tree.map(self._place, rows),
        )

    @property
    def _params(self) -> dict:
        return {"model": self.model.params, **self.method.params}

    def _advance(self, state, steps: np.int32):
        config, method = self.model.config, self.method
        if method.drafter is None:
            params = self.model.params
            state = decoding.decode(config, params, state, steps, method.rows)
        else:
            state = speculative.speculate(
                config, method.drafter, self._params, state, steps, method.rows
            )
        return jax.block_until_ready(state)

    def _done(self, state) -> np.ndarray:
        return np.asarray(_decode_state(state).done)

    def _end_rows(self, state, rows: list[int]):
        """The state with these rows done, wherever they stand."""
        done = self._done(state).copy()
        done[rows] = True
        decode = _decode_state(state).replace(done=self._place(done))
        return decode if state is _decode_state(state) else state.replace(decode=decode)

    def _collect(self, state, request: Request) -> list[Answer]:
        """Each row's answer so far."""
        decode = _decode_state(state)
        arrays = decode.history, decode.length, decode.scores
        history, ends, scores = jax.device_get(arrays)
        trace = None if decode is state else jax.device_get(state.trace)
        answers = []
        for row, prompt in enumerate(request.prompts):
            span = slice(len(prompt), ends[row])
            ids = history[row, span].tolist()
            if ids[-1:] == [BROKEN]:
                raise FloatingPointError(
                    f"the model's logits hold a NaN at position {ends[row] - 1} of row "
                    f"{row}; load the model with dtype=jnp.float32, or check its file"
                )
            stopped = bool(ids) and ids[-1] in request.eos_ids
            counts = [], [], [1] * len(ids)
            if trace is not None:
                rounds = int(trace.rounds[row])
                counts = (trace.proposed, trace.accepted, trace.committed)
                counts = [count[row, :rounds].tolist() for count in counts]
            logprobs = scores[row, span].tolist() if request.logprobs else None
            reason = "stop" if stopped else "length"
            answers.append(Answer(ids, reason, *counts, logprobs=logprobs))
        return answers


def _decode_state(state) -> DecodeState:
    """The plain state inside a draft-verify state, or the state itself."""
    return state if isinstance(state, DecodeState) else state.decode


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

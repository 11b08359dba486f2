"""A session: prompts in, answers out, the cache kept from one turn to the next."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence

import numpy as np

from m2r2_jax.checkpoints.model import Model
from m2r2_jax.drafters.methods import Method
from m2r2_jax.models.cache import KVCache, grow
from m2r2_jax.serving.answers import Answer, StopStrings
from m2r2_jax.serving.engine import Engine, chunks_for
from m2r2_jax.serving.requests import Request, make_request

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
        self.engine = Engine(model, method, batch)
        self._cache: KVCache | None = None
        self._cached_ids: list[list[int]] = [[] for _ in range(batch)]

    @property
    def model(self) -> Model:
        return self.engine.model

    @property
    def method(self) -> Method:
        return self.engine.method

    @property
    def batch(self) -> int:
        return self.engine.batch

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
        chunks = chunks_for(prompts, kept)
        capacity = self.engine.capacity_for(request, kept)
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
            looks = itertools.islice(chunks, -(-max_steps // max(1, steps)))
            *_, answers = itertools.chain([answers], looks)
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
        cache = self._take_cache(plan.capacity, np.array(plan.kept))
        state = self.engine.begin(request, cache)
        watches = [
            StopStrings(self.model.tokenizer, request.stop, params.min_new_tokens)
            for params in request.sampling
        ]
        answers = [Answer([], "length") for _ in prompts]
        try:
            yield answers
            while not all(self.engine.done(state)):
                # Lost if the pass is interrupted, or broken.
                running, state = state, None
                running = self.engine.advance(running, steps)
                found = self.engine.collect(running, request)
                answers = [w.apply(a) for w, a in zip(watches, found, strict=True)]
                cut = [row for row, a in enumerate(answers) if a.stopped_at is not None]
                state = self.engine.end(running, cut) if cut else running
                yield answers
        finally:
            if state is not None:
                self._keep(state, prompts, answers)

    def _keep(self, state, prompts, answers: list[Answer]) -> None:
        """Keeps the cache for the next turn: all that was given but its last token."""
        self._cache = state.cache
        self._cached_ids = [
            [*prompt, *answer.token_ids][:-1]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    def _take_cache(self, capacity: int, length: np.ndarray) -> KVCache:
        """The kept cache rolled back to `length`, or a new one; the session's own
        reference is dropped, since the cache will be donated.
        """
        cache, self._cache = self._cache, None
        # If this run is interrupted, the next one starts from an empty cache.
        self._cached_ids = [[] for _ in range(self.batch)]
        if cache is None:
            return self.engine.new_cache(capacity)
        cache = grow(cache, capacity)
        return cache.replace(length=self.model.place(length.astype(np.int32)))


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))

"""Many prompts on a few rows: a row whose answer has ended takes the next prompt.

Rows decode together in one program; between two chunks of passes the host gives out
what has ended and prefills the next prompts into the free rows, one by one.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np
from jax import lax

from m2r2_jax.checkpoints.model import Model
from m2r2_jax.decoding.settings import SamplingParams
from m2r2_jax.decoding.state import DecodeState
from m2r2_jax.drafters.methods import Method
from m2r2_jax.serving.answers import Answer, StopStrings
from m2r2_jax.serving.engine import Engine
from m2r2_jax.serving.requests import Request, make_request, stop_strings

_CHUNK = 8
_GREEDY = SamplingParams()


def answer_all(
    model: Model,
    method: Method,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    batch: int = 8,
    sampling: SamplingParams = _GREEDY,
    stop: Iterable[str] | None = (),
    **settings,
) -> Iterator[tuple[int, Answer]]:
    """Answers prompts in the order in which they end.

    Args:
      model: from `load`, without a mesh.
      method: from `build_method`.
      prompts: token ids of each.
      max_new_tokens: at most this many ids each.
      batch: rows that decode together.
      sampling: settings of all prompts; each draws with a seed of its own, that of
        `sampling.for_prompt(index)`.
      stop: strings that end an answer.
      **settings: the others of `requests.make_request`, the same for all prompts.

    Yields:
      Index of a prompt, and its answer; in exact mode that of its single run.

    Raises:
      ValueError: as `make_request`, for any of the prompts, before any work.
    """
    if model.mesh is not None:
        raise ValueError("rows are refilled on one device; use Session over a mesh")
    if batch < 1:
        raise ValueError(f"batch {batch} must be at least 1")
    settings["stop"] = stop_strings(stop)
    requests = []
    for index, prompt in enumerate(prompts):
        settings |= {"sampling": sampling.for_prompt(index), "first": index}
        requests.append(make_request(model, 1, [prompt], max_new_tokens, **settings))
    if not requests:
        return iter(())
    return _Slots(model, method, min(batch, len(requests)), requests).run()


class _Slots:
    """Rows and the prompts they are at.

    Attributes:
      at: index of each row's prompt; None for a row that has none.
    """

    def __init__(
        self, model: Model, method: Method, batch: int, requests: list[Request]
    ):
        self.requests = requests
        self.one, self.all = Engine(model, method, 1), Engine(model, method, batch)
        self.capacity = max(self.one.capacity_for(r, [0]) for r in requests)
        self.at: list[int | None] = [None] * batch
        self.watches: list[StopStrings | None] = [None] * batch

    def run(self) -> Iterator[tuple[int, Answer]]:
        waiting = collections.deque(range(len(self.requests)))
        state = self.all.idle(self.requests[0], self.capacity)
        while True:
            for row, index in enumerate(self.at):
                if index is None and waiting:
                    single = self._begin(row, waiting.popleft())
                    state = _put_row(state, single, np.int32(row))
            if all(index is None for index in self.at):
                return
            state = self.all.advance(state, _CHUNK)
            done = self.all.done(state)
            for row, answer in enumerate(self._answers(state)):
                if answer is not None and (done[row] or answer.stopped_at is not None):
                    yield self.at[row], answer
                    self.at[row] = None
            state = self.all.end(
                state, [row for row, index in enumerate(self.at) if index is None]
            )

    def _begin(self, row: int, index: int) -> DecodeState:
        """The state of one row behind its prompt's prefill."""
        request = self.requests[index]
        params = request.sampling[0]
        tokenizer = self.one.model.tokenizer
        self.at[row] = index
        self.watches[row] = StopStrings(tokenizer, request.stop, params.min_new_tokens)
        return self.one.begin(request, self.one.new_cache(self.capacity))

    def _answers(self, state: DecodeState) -> list[Answer | None]:
        """The answers so far of the rows at work, cut at their stop strings."""
        first = self.requests[0]
        prompts = [[0] if i is None else self.requests[i].prompts[0] for i in self.at]
        asked = dataclasses.replace(first, prompts=prompts, numbers=self.at)
        answers = self.all.collect(state, asked)
        return [
            None if index is None else watch.apply(answer)
            for index, watch, answer in zip(self.at, self.watches, answers, strict=True)
        ]


@functools.partial(jax.jit, donate_argnums=(0,))
def _put_row(whole, single, row):
    """The state with one row replaced; leaves without a batch axis are shared."""

    def put(leaf, new):
        if leaf.shape == new.shape:
            return new
        axes = zip(leaf.shape, new.shape, strict=True)
        axis = next(i for i, (many, one) in enumerate(axes) if many != one)
        return lax.dynamic_update_slice_in_dim(leaf, new, row * new.shape[axis], axis)

    return jax.tree.map(put, whole, single)

"""The device's side of decoding: a fixed number of rows, with one method.

`Session` and `slots` decide what the rows are given and what is kept of them; here is
what happens in between, state in and state out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from m2r2_jax.checkpoints.model import Model
from m2r2_jax.decoding import loop, passes
from m2r2_jax.decoding.adjustments import Adjustments
from m2r2_jax.decoding.drafting import Prefill
from m2r2_jax.decoding.sampling import BROKEN, NOTHING, Sampling
from m2r2_jax.decoding.state import DecodeState, Trace
from m2r2_jax.drafters.methods import Method
from m2r2_jax.models import sharding
from m2r2_jax.models.cache import KVCache, init_cache
from m2r2_jax.serving.answers import Answer
from m2r2_jax.serving.requests import Request

_SLOT_STEP = 256  # Caches grow in these steps, so that shapes are few.


class Engine:
    """B rows of one model and one method, decoded together.

    Attributes:
      model: from `load`.
      method: from `build_method`.
      batch: B.
    """

    def __init__(self, model: Model, method: Method, batch: int):
        """Raises ValueError when the mesh cannot hold the batch."""
        shards = sharding.batch_size(model.mesh)
        if batch < 1 or batch % shards:
            raise ValueError(
                f"batch {batch} does not fill the mesh's data axis of {shards}; use a "
                f"multiple of {shards}"
            )
        self.model, self.method, self.batch = model, method, batch

    def capacity_for(self, request: Request, kept: Sequence[int]) -> int:
        """Slots that the rows' caches need, the rows of a pass included."""
        rows = self.method.drafter.layout.size
        pass_rows = max(self.model.execution.least_rows, rows)
        prefilled = max(kept) + sum(chunks_for(request.prompts, kept))
        needed = max(prefilled, max(request.limits) + pass_rows)
        return -(-needed // _SLOT_STEP) * _SLOT_STEP

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache, born on its devices."""
        return _cache_maker(
            self.model.config,
            self.model.mesh,
            self.batch,
            capacity,
            self.model.stream_dtype,
            self.model.unrolled,
        )()

    def begin(self, request: Request, cache: KVCache) -> DecodeState:
        """The state before the first pass.

        Args:
          request: one prompt a row.
          cache: donated; the first `length` positions of each row are its prompt's.
        """
        cache, hidden = self._prefill(request.prompts, cache)
        state = self._state(cache, request)
        prefill = Prefill(state.history, state.length, hidden)
        drafter = self.method.drafter.init(self.model.decoder, self._params, prefill)
        return state.replace(drafter=drafter)

    def idle(self, request: Request, capacity: int) -> DecodeState:
        """A state whose rows are all done, of the shapes that `begin` gives."""
        nothing = dataclasses.replace(
            request,
            prompts=[[0]] * self.batch,
            limits=[0] * self.batch,
            numbers=[0] * self.batch,
            sampling=request.sampling[:1] * self.batch,
        )
        return self.begin(nothing, self.new_cache(capacity))

    def _prefill(self, prompts, cache: KVCache) -> tuple[KVCache, jax.Array]:
        """Brings the cache to every position before each prompt's last token."""
        model = self.model
        position = np.asarray(cache.length)
        ends = np.array([len(prompt) - 1 for prompt in prompts])
        zeros = np.zeros((self.batch, model.config.width), model.stream_dtype)
        hidden = model.place(zeros)
        for size in chunks_for(prompts, position):
            count = np.clip(ends - position, 0, size)
            tokens = np.zeros((self.batch, size), np.int32)
            for row, prompt in enumerate(prompts):
                chunk = prompt[position[row] : position[row] + count[row]]
                tokens[row, : count[row]] = chunk
            placed = model.place((tokens, count.astype(np.int32)))
            cache, hidden = passes.prefill(
                model.decoder, model.params, cache, hidden, *placed
            )
            position = position + count
        return jax.block_until_ready((cache, hidden))

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
            "trace": Trace.empty(*history.shape),
        }
        return DecodeState(
            cache=cache,
            eos=jnp.asarray(sorted(request.eos_ids), jnp.int32),
            scored=jnp.asarray(request.logprobs),
            drafter=(),
            **self.model.place(rows),
        )

    @property
    def _params(self) -> dict:
        return {"model": self.model.params, **self.method.params}

    def advance(self, state: DecodeState, steps: int) -> DecodeState:
        """The state after at most so many passes of the full model; donated."""
        decoder, drafter = self.model.decoder, self.method.drafter
        state = loop.decode(decoder, drafter, self._params, state, np.int32(steps))
        return jax.block_until_ready(state)

    def done(self, state: DecodeState) -> np.ndarray:
        """Which rows have ended: `bool[B]`."""
        return np.asarray(state.done)

    def end(self, state: DecodeState, rows: Sequence[int]) -> DecodeState:
        """The state with these rows done, wherever they stand."""
        done = self.done(state).copy()
        done[rows] = True
        return state.replace(done=self.model.place(done))

    def collect(self, state: DecodeState, request: Request) -> list[Answer]:
        """Each row's answer so far.

        Raises:
          FloatingPointError: the model's logits hold a NaN.
          ValueError: a row's settings leave no token.
        """
        arrays = state.history, state.length, state.scores, state.trace
        history, ends, scores, trace = jax.device_get(arrays)
        answers = []
        for row, prompt in enumerate(request.prompts):
            span = slice(len(prompt), ends[row])
            ids = history[row, span].tolist()
            _check_choice(
                ids[-1:], f"position {ends[row] - 1} of row {request.numbers[row]}"
            )
            stopped = bool(ids) and ids[-1] in request.eos_ids
            rounds = int(trace.rounds[row])
            counts = (trace.proposed, trace.accepted, trace.committed)
            counts = [count[row, :rounds].tolist() for count in counts]
            logprobs = scores[row, span].tolist() if request.logprobs else None
            reason = "stop" if stopped else "length"
            answers.append(Answer(ids, reason, *counts, logprobs=logprobs))
        return answers


def _check_choice(last: list[int], where: str) -> None:
    """Raises the error that an answer's last choice stands for."""
    if last == [BROKEN]:
        raise FloatingPointError(
            f"the model's logits hold a NaN at {where}; load the model with "
            "dtype=jnp.float32, or check its file"
        )
    if last == [NOTHING]:
        raise ValueError(
            f"the settings leave no token at {where}: logit_bias, penalties and "
            "min_new_tokens together forbid every id"
        )


def chunks_for(prompts: Sequence[Sequence[int]], kept: Sequence[int]) -> list[int]:
    """Padded sizes of the prefill calls behind the kept positions."""
    longest = max(len(p) - 1 - int(k) for p, k in zip(prompts, kept, strict=True))
    return passes.chunk_sizes(longest)


@functools.cache
def _cache_maker(config, mesh, batch: int, capacity: int, dtype, unrolled: bool):
    """The function behind `new_cache`; kept, or every session would compile it."""
    create = functools.partial(
        init_cache, config, batch, capacity, dtype, unrolled=unrolled
    )
    if mesh is None:
        return jax.jit(create)
    shardings = sharding.cache_shardings(mesh, jax.eval_shape(create))
    return jax.jit(create, out_shardings=shardings)

"""What rounds of different methods take on this machine, taking turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from m2r2_jax import Method, Model, Session

_PROMPT = "Tell me about the history of the printing press, step by step."
_ROUNDS, _REPEATS = 24, 5


def seconds_a_round(model: Model, methods: Sequence[Method]) -> list[float]:
    """Median seconds of a round of each method, all of them interleaved.

    The answer goes on behind an end of turn, so that all methods run as many rounds.
    """
    prompt = model.tokenizer.encode_chat([{"role": "user", "content": _PROMPT}])
    sessions = [Session(model, method) for method in methods]
    taken: list[list[float]] = [[] for _ in methods]
    for _ in range(1 + _REPEATS):
        for session, times in zip(sessions, taken, strict=True):
            (answer,), timing = session.run(
                [prompt], 200, max_steps=_ROUNDS, eos_ids=frozenset()
            )
            times.append(timing.decode_seconds / len(answer.committed))
    # The first turn compiled.
    return [statistics.median(times[1:]) for times in taken]

"""Counting and timing what JAX compiles."""

from __future__ import annotations

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileClock:
    """Counts compilations of this process, and their seconds, from its creation on.

    A program found in the persistent cache counts too: it had to be looked up because
    its shapes were new to the process.
    """

    def __init__(self):
        self.count = 0
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **_) -> None:
        if event == _EVENT:
            self.count += 1
            self.seconds += duration

"""Compiling, and counting and timing what JAX compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_REORDERED_SUMS = {"xla_cpu_enable_fast_math": True}


def jit(function: Callable, **options) -> Callable:
    """`jax.jit` for a decoding loop whose first argument is a `ModelConfig`.

    The loops of `layers.linear`'s fused sums are only vectorised where LLVM may
    reorder sums. XLA's option for it leaves NaNs and infinities alone; programs that
    promise exact rows are compiled without it.
    """
    exact = jax.jit(function, **options)
    fused = jax.jit(function, **options, compiler_options=_REORDERED_SUMS)

    @functools.wraps(function)
    def call(config, *args, **kwargs):
        chosen = fused if config.products == "fast_on_cpu" else exact
        return chosen(config, *args, **kwargs)

    return call


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

"""Compiling, and counting and timing what JAX compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


def jit(function: Callable, **options) -> Program:
    """`jax.jit` for a program whose first argument is a static `Decoder`."""
    return Program(function, options)


class Program:
    """A jitted function that is compiled as its decoder's `Execution` asks."""

    def __init__(self, function: Callable, options: dict):
        functools.update_wrapper(self, function)
        self._function = function
        self._options = options
        self._jitted: dict[tuple, Callable] = {}

    def __call__(self, decoder, *args, **kwargs):
        return self._for(decoder)(decoder, *args, **kwargs)

    def lower(self, decoder, *args, **kwargs):
        """As `jax.jit`'s: the program for these arguments, which may be abstract."""
        return self._for(decoder).lower(decoder, *args, **kwargs)

    def _for(self, decoder) -> Callable:
        compiler_options = decoder.execution.compiler_options
        key = tuple(sorted(compiler_options.items()))
        if key not in self._jitted:
            self._jitted[key] = jax.jit(
                self._function, **self._options, compiler_options=compiler_options
            )
        return self._jitted[key]


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

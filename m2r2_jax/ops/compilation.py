"""Compiling, and counting and timing what JAX compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from m2r2_jax.ops.products import FUSED_PRODUCTS

_EVENT = "/jax/core/compile/backend_compile_duration"
_REORDERED_SUMS = {"xla_cpu_enable_fast_math": True}
# XLA's CPU backend keeps to half of the widest vectors unless told otherwise.
_WIDEST_VECTORS = {"xla_cpu_prefer_vector_width": 512}


def jit(function: Callable, **options) -> Callable:
    """`jax.jit` for a program whose first argument is a `ModelConfig`.

    The loops of `products.linear`'s fused sums are only vectorised where LLVM may
    reorder sums. XLA's option for it leaves NaNs and infinities alone; programs that
    promise exact rows are compiled without it.
    """
    fused = {
        products: jax.jit(
            function,
            **options,
            compiler_options=_REORDERED_SUMS
            | (_WIDEST_VECTORS if registers == 32 else {}),
        )
        for products, registers in FUSED_PRODUCTS.items()
    }
    others = jax.jit(function, **options)

    @functools.wraps(function)
    def call(config, *args, **kwargs):
        return fused.get(config.products, others)(config, *args, **kwargs)

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

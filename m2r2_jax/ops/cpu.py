"""What the CPU of this machine has, which decides how it multiplies fastest."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

_INFO = Path("/proc/cpuinfo")
_BF16_UNITS = {"avx512_bf16", "amx_bf16"}


@functools.cache
def flags() -> frozenset[str]:
    """Names of its instruction sets; none where the system does not list them."""
    return frozenset(_INFO.read_text().split() if _INFO.is_file() else ())


def has_bf16_units() -> bool:
    """Whether it multiplies bf16 matrices in units of their own."""
    return not _BF16_UNITS.isdisjoint(flags())


def vector_registers() -> int:
    """How many vector registers it has: 32 with AVX-512 and on 64-bit Arm, else 16."""
    arm = platform.machine().lower() in ("aarch64", "arm64")
    return 32 if arm or "avx512vl" in flags() else 16

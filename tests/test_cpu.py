"""What a CPU has, and what follows from it."""

import jax.numpy as jnp
import pytest

from experiments.models import fastest_matrix_dtype
from m2r2_jax.ops import cpu


@pytest.mark.parametrize(
    ("machine", "flags", "registers", "dtype"),
    [
        ("x86_64", "fpu avx2 fma", 16, "float32"),
        ("x86_64", "fpu avx2 avx512f avx512vl", 32, "float32"),
        ("x86_64", "fpu avx2 avx512vl avx512_bf16 amx_bf16", 32, "bfloat16"),
        ("aarch64", "fp asimd", 32, "float32"),
        ("arm64", None, 32, "float32"),
        ("AMD64", None, 16, "float32"),
    ],
)
def test_registers_and_matrix_units_are_read_from_the_system(
    tmp_path, monkeypatch, machine, flags, registers, dtype
):
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
    monkeypatch.setattr(cpu, "_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(cpu.platform, "machine", lambda: machine)
    cpu.flags.cache_clear()
    try:
        assert cpu.vector_registers() == registers
        assert jnp.dtype(fastest_matrix_dtype()) == dtype
    finally:
        cpu.flags.cache_clear()

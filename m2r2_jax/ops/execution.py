"""How this device multiplies rows and weights: chosen once, at load."""

from __future__ import annotations

import dataclasses

import jax

from m2r2_jax.ops.cpu import vector_registers

_PRODUCTS = ("plain", "fused", "exact")
_KERNELS = (None, "reference", "tpu", "gpu", "interpret")


@dataclasses.dataclass(frozen=True)
class Execution:
    """Static choices that programs are compiled for; values differ in last bits.

    Attributes:
      products: how rows are multiplied by weights. "plain": one product, for training,
        GPU and TPU. "fused": what is fastest for so many rows on XLA's CPU backend;
        two rows in f32 take the time of one. "exact": a row's f32 result does not
        depend on the rows beside it, and no pass has fewer than two.
      registers: vector registers of the CPU, which bound fused sums; 0 where "fused"
        is not chosen.
      kernels: the implementation of `pallas_kernels` for passes of few rows; None
        leaves all products to XLA.
    """

    products: str = "plain"
    registers: int = 0
    kernels: str | None = None

    def __post_init__(self):
        if self.kernels not in _KERNELS:
            raise ValueError(
                f"kernels {self.kernels!r} are unknown; choose from "
                f"{', '.join(map(str, _KERNELS))}"
            )
        if self.products not in _PRODUCTS:
            raise ValueError(
                f"products {self.products!r} is unknown; choose from "
                f"{', '.join(_PRODUCTS)}"
            )

    @classmethod
    def here(cls) -> Execution:
        """What is fastest on the default device."""
        if jax.default_backend() != "cpu":
            return cls()
        return cls("fused", vector_registers())

    @property
    def least_rows(self) -> int:
        """Rows of a pass without drafts. A product of one row takes another kernel
        than one of several, so the exact mode repeats a lone row; the fused kernels
        have no way for one, which takes them as long as two.
        """
        return 2 if self.products == "exact" or self.kernels else 1

    @property
    def compiler_options(self) -> dict[str, bool | int]:
        """Options of XLA's for programs that run this way.

        The loops of fused sums are only vectorised where LLVM may reorder sums (NaNs
        and infinities are left alone), and XLA's CPU backend keeps to half of the
        widest vectors unless told otherwise.
        """
        options: dict[str, bool | int] = {}
        if self.products == "fused":
            options["xla_cpu_enable_fast_math"] = True
        if self.registers == 32:
            options["xla_cpu_prefer_vector_width"] = 512
        return options

    def has_registers(self, sums: int) -> bool:
        """Whether so many sums of fused products stay in vector registers."""
        return self.products == "fused" and sums <= self.registers * 3 // 4


PLAIN = Execution("plain")
EXACT = Execution("exact")

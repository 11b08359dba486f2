"""Shapes of real models, for checking and timing the kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from m2r2_jax.models.config import ModelConfig
from pallas_kernels import LowRank, QTensor, decode_attention, fast_update

SMOLLM2 = ModelConfig(
    "SmolLM2-135M", 49_152, 30, 576, 1536, 9, 3, 64, 1e5, 1e-5, True, 8192
)
LLAMA_3_8B = ModelConfig(
    "Llama-3-8B", 128_256, 32, 4096, 14_336, 32, 8, 128, 5e5, 1e-5, False, 8192
)
MODELS = (
    SMOLLM2,
    ModelConfig(
        "Gemma-3-270M", 262_144, 18, 640, 2048, 4, 1, 256, 1e6, 1e-6, True, 32_768
    ),
    ModelConfig(
        "Phi-3-mini", 32_064, 32, 3072, 8192, 32, 32, 96, 1e4, 1e-5, False, 4096
    ),
    LLAMA_3_8B,
    # Attention as it is; the hidden width is one expert's.
    ModelConfig(
        "OLMoE-1B-7B", 50_304, 16, 2048, 1024, 16, 16, 128, 1e4, 1e-5, False, 4096
    ),
)
_RANK = 64
# Slots of a cache: what a chat of some turns fills.
_SLOTS = 4096


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """One call of a kernel; half of the rows are slow ones.

    Attributes:
      kernel: the public function.
      model: whose shapes they are.
      place: which product of a block, or "attention".
      weight: dtype of the weight or of the cache.
      rows: slow and fast ones together.
      arguments: a pytree of abstract arrays.
    """

    kernel: Callable
    model: str
    place: str
    weight: str
    rows: int
    arguments: dict

    @property
    def name(self) -> str:
        return f"{self.model} {self.place}, {self.rows} rows, {self.weight}"

    def run(self, implementation: str, arguments: dict) -> jax.Array:
        """All rows in one call."""
        slow = {"slow": self.rows // 2} if self.kernel is fast_update else {}
        return self.kernel(**arguments, **slow, implementation=implementation)

    def run_apart(self, arguments: dict) -> tuple[jax.Array, jax.Array]:
        """Slow and fast rows in two passes of XLA's, the second behind the first."""
        half = self.rows // 2
        update = self.kernel is fast_update
        plain = {k: v for k, v in arguments.items() if k != "accelerator"}
        slow = self.kernel(
            **_some_rows(plain, slice(half)),
            **({"slow": half} if update else {}),
            implementation="reference",
        )
        # Without it, XLA may make one product of both.
        arguments, slow = lax.optimization_barrier((arguments, slow))
        fast = self.kernel(
            **_some_rows(arguments, slice(half, None)),
            **({"slow": 0} if update else {}),
            implementation="reference",
        )
        return slow, fast


def _some_rows(arguments: dict, rows: slice) -> dict:
    """The arguments with some of their rows only."""
    axis = {"x_Ri": 0, "residual_Ro": 0, "q_BRKGH": 1, "mask_BRS": 1}
    return {
        name: leaf[(slice(None),) * axis[name] + (rows,)] if name in axis else leaf
        for name, leaf in arguments.items()
    }


def kernel_calls(rows: int = 8) -> list[KernelCall]:
    """Both kernels at every model's shapes; one weight a model in eight bits."""
    calls = []
    for model in MODELS:
        for place in ("qkv", "out", "gate_up", "down"):
            calls.append(update_call(model, place, rows, "bfloat16"))
        calls.append(update_call(model, "gate_up", rows, "int8"))
        calls.append(attention_call(model, rows, _SLOTS, "bfloat16"))
    calls.append(update_call(LLAMA_3_8B, "down", 128, "bfloat16"))
    calls.append(update_call(SMOLLM2, "gate_up", rows, "float32"))
    calls.append(attention_call(SMOLLM2, rows, _SLOTS, "float32"))
    return calls


def update_call(
    model: ModelConfig, place: str, rows: int, weight: str, dtype: str = ""
) -> KernelCall:
    """The fused update of one of a block's products."""
    dtype = dtype or ("bfloat16" if weight == "int8" else weight)
    D, F, H = model.width, model.hidden_width, model.head_dim
    heads = model.num_heads * H
    width_out, width_in = {
        "qkv": (heads + 2 * model.num_kv_heads * H, D),
        "out": (D, heads),
        "gate_up": (F, D),
        "down": (D, F),
    }[place]
    parts = (2,) if place == "gate_up" else ()
    matrix = _array((*parts, width_out, width_in), weight)
    if weight == "int8":
        matrix = QTensor(matrix, _array((*parts, width_out), "float32"))
    low_rank = (*parts, width_in, _RANK), (*parts, _RANK, width_out)
    arguments = {
        "x_Ri": _array((rows, width_in), dtype),
        "weight": matrix,
        "accelerator": LowRank(*(_array(shape, dtype) for shape in low_rank)),
    }
    if place in ("qkv", "gate_up"):
        arguments["norm_i"] = _array((width_in,), dtype)
    else:
        arguments["residual_Ro"] = _array((rows, width_out), dtype)
    return KernelCall(fast_update, model.name, place, weight, rows, arguments)


def attention_call(
    model: ModelConfig, rows: int, slots: int, dtype: str, batch: int = 1
) -> KernelCall:
    """Attention of a pass on a cache of so many slots."""
    K, G, H = model.num_kv_heads, model.queries_per_kv, model.head_dim
    arguments = {
        "q_BRKGH": _array((batch, rows, K, G, H), dtype),
        "keys_JSH": _array((batch * K, slots, H), dtype),
        "values_JSH": _array((batch * K, slots, H), dtype),
        "mask_BRS": _array((batch, rows, slots), "bool"),
        "start_B": _array((batch,), "int32"),
        "stop_B": _array((batch,), "int32"),
    }
    return KernelCall(decode_attention, model.name, "attention", dtype, rows, arguments)


def _array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

"""The fused fast-rate update: slow and fast rows through a weight read once.

Rows of both residual streams are stacked, slow ones first. A tile of the weight is
brought into fast memory once and multiplied by all of them; fast rows get the
accelerator's low-rank term `(p A) B` on top (arXiv 2502.02040; the fusion is ours),
and what stands around the product in a block is done on the way:

  place       prologue   epilogue
  q, k, v     RMSNorm    -
  o           -          residual added
  gate, up    RMSNorm    SiLU of the gate, times up
  down        -          residual added

This file holds the contract and the reference; kernels lie in `fast_update_tpu` and
`fast_update_gpu`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import fast_update_gpu, fast_update_tpu
from pallas_kernels.dispatch import dispatch
from pallas_kernels.products import product
from pallas_kernels.quantized import QTensor

MAX_ROWS = 128


class LowRank(NamedTuple):
    """An accelerator: `down [in, r]` and `up [r, out]`; of gate and up `[2, ...]`."""

    down: jax.Array
    up: jax.Array


def fast_update(
    x_Ri: jax.Array,
    weight: jax.Array | QTensor,
    accelerator: LowRank | None = None,
    *,
    slow: int,
    residual_Ro: jax.Array | None = None,
    norm_i: jax.Array | None = None,
    epsilon: float = 1e-5,
    implementation: str | None = None,
    config: fast_update_tpu.Config | fast_update_gpu.Config | None = None,
) -> jax.Array:
    """`epilogue(prologue(x) W + (prologue(p) A) B)`, the last term for fast rows only.

    Operands are taken in the weight's dtype, those of eight-bit weights in the rows'
    (every int8 is exact in bf16). Sums, norm, SiLU and residual are f32.

    Args:
      x_Ri: 2..128 rows, bf16 or f32; the first `slow` are the slow stream's.
      weight: `[out, in]`, or `[2, out, in]` for gate and up, whose gated product is
        returned; an array in bf16 or f32, or a `QTensor`.
      accelerator: low-rank term of the fast rows; taken in the operands' dtype.
      slow: how many leading rows are slow.
      residual_Ro: added to the result.
      norm_i: scale of the RMSNorm that rows pass first; None leaves them as they are.
      epsilon: of the norm.
      implementation: "reference", "tpu", "gpu", or "interpret" (the TPU kernel step by
        step on any backend). A named one never falls back; None takes the default
        backend's kernel, and the reference for what that cannot serve.
      config: block sizes of the kernel; its own choice by default.

    Returns:
      `[R, out]` in the dtype of the residual, or else of the rows.

    Raises:
      ValueError: shapes or dtypes that do not belong together.
      NotImplementedError: what a named kernel cannot serve.
    """
    _validate(x_Ri, weight, accelerator, slow, residual_Ro, norm_i)
    call = (x_Ri, weight, accelerator, residual_Ro, norm_i)
    settings = {"slow": slow, "epsilon": epsilon}
    tpu = functools.partial(fast_update_tpu.run, *call, **settings, config=config)
    gpu = functools.partial(fast_update_gpu.run, *call, **settings, config=config)
    return dispatch(
        {
            "reference": functools.partial(reference, *call, **settings),
            "tpu": tpu,
            "gpu": gpu,
            "interpret": functools.partial(tpu, interpret=True),
        },
        implementation,
    )


def reference(
    x_Ri: jax.Array,
    weight: jax.Array | QTensor,
    accelerator: LowRank | None,
    residual_Ro: jax.Array | None,
    norm_i: jax.Array | None,
    *,
    slow: int,
    epsilon: float,
) -> jax.Array:
    """The contract in jax.numpy; arguments as in `fast_update`."""
    rows_Ri = x_Ri
    if norm_i is not None:
        x_f32 = x_Ri.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True)
        normed = x_f32 * lax.rsqrt(mean_square + epsilon) * norm_i.astype(jnp.float32)
        rows_Ri = normed.astype(x_Ri.dtype)
    values, scale = weight if isinstance(weight, QTensor) else (weight, None)
    operand = x_Ri.dtype if scale is not None else values.dtype
    rows_Ri = rows_Ri.astype(operand)
    y = product(rows_Ri, values.astype(operand), "ri,...oi->...ro")
    if scale is not None:
        y = y * scale[..., None, :]
    if accelerator is not None:
        down, up = (leaf.astype(operand) for leaf in accelerator)
        latent = product(rows_Ri[slow:], down, "ri,...ik->...rk").astype(operand)
        y = y.at[..., slow:, :].add(product(latent, up, "...rk,...ko->...ro"))
    if y.ndim == 3:
        y = jax.nn.silu(y[0]) * y[1]
    if residual_Ro is None:
        return y.astype(x_Ri.dtype)
    return (residual_Ro.astype(jnp.float32) + y).astype(residual_Ro.dtype)


def _validate(x_Ri, weight, accelerator, slow, residual_Ro, norm_i) -> None:
    """Raises ValueError where arguments do not belong together."""
    if x_Ri.ndim != 2 or not 2 <= len(x_Ri) <= MAX_ROWS:
        raise ValueError(
            f"rows {x_Ri.shape} must be [R, in] with R in 2..{MAX_ROWS}; split more "
            "rows, and pad a single one"
        )
    rows, width_in = x_Ri.shape
    if not 0 <= slow <= rows:
        raise ValueError(f"slow {slow} must be 0..{rows}, the number of rows")
    *parts, width_out, expected = weight.shape
    if expected != width_in or parts not in ([], [2]):
        raise ValueError(
            f"weight {weight.shape} must be [out, in] or [2, out, in] with the rows' "
            f"in, {width_in}"
        )
    values = weight.values if isinstance(weight, QTensor) else weight
    allowed = (
        (jnp.int8,) if isinstance(weight, QTensor) else (jnp.float32, jnp.bfloat16)
    )
    if values.dtype not in allowed or x_Ri.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"rows of {x_Ri.dtype} and a weight of {values.dtype}: both must be "
            "float32 or bfloat16, or the weight a QTensor of int8"
        )
    shapes = {
        "residual": (residual_Ro, (rows, width_out)),
        "norm": (norm_i, (width_in,)),
    }
    if isinstance(weight, QTensor):
        shapes["scale"] = (weight.scale, (*parts, width_out))
    if accelerator is not None:
        rank = accelerator.down.shape[-1]
        shapes["accelerator.down"] = (accelerator.down, (*parts, width_in, rank))
        shapes["accelerator.up"] = (accelerator.up, (*parts, rank, width_out))
    for name, (array, shape) in shapes.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} is {array.shape}, expected {shape}")

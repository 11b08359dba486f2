"""The fused fast-rate update on Hopper GPUs.

Each block of threads has 64 outputs and runs over the inputs. Weights are the left
operand of the matrix unit, which has 64 rows, and the few rows of the streams are its
columns: only so are none of them padding. The result and the residual are therefore
transposed, which XLA does outside, as it does the norm and `p A`: every block would
have to repeat them.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic_gpu
from pallas_kernels.mosaic_gpu import WARPGROUP_ROWS, plgpu, transposed

_BLOCK_RANK = 64
# Columns of a product come in eights.
_COLUMNS = 8
# Steps loaded ahead, and their share of the 227 KiB of shared memory.
_MOST_STEPS, _STEPS_BYTES = 8, 192 * 2**10


@dataclasses.dataclass(frozen=True)
class Config:
    """Block sizes.

    Attributes:
      block_in: inputs of a step, a multiple of 64.
      steps: how many steps are loaded ahead.
    """

    block_in: int
    steps: int


def heuristic(width_in: int, rows: int) -> Config:
    """Block sizes without measuring: long steps, as many as there is memory for."""
    block_in = 128 if width_in % 128 == 0 else 64
    step_bytes = 2 * block_in * (WARPGROUP_ROWS + rows)
    return Config(block_in, min(_MOST_STEPS, _STEPS_BYTES // step_bytes))


def search_space(width_in: int) -> tuple[Config, ...]:
    """Block sizes worth measuring for so many inputs."""
    blocks = (block for block in (64, 128, 256) if width_in % block == 0)
    return tuple(Config(block, steps) for block in blocks for steps in (2, 4, 8))


def run(
    x_Ri,
    weight,
    accelerator,
    residual_Ro,
    norm_i,
    *,
    slow: int,
    epsilon: float,
    config: Config | None = None,
) -> jax.Array:
    """The kernel; arguments as in `fast_update.fast_update`."""
    mosaic_gpu.check_backend()
    values, scale = weight if isinstance(weight, tuple) else (weight, None)
    operands = (x_Ri,) if scale is not None else (x_Ri, values)
    mosaic_gpu.check_bfloat16("rows and weights", *operands)
    values_Poi = values.reshape(-1, *values.shape[-2:])
    parts, width_out, width_in = values_Poi.shape
    config = config or heuristic(width_in, len(x_Ri))
    tiles = mosaic_gpu.whole_blocks("outputs", width_out, WARPGROUP_ROWS)
    mosaic_gpu.whole_blocks("inputs", width_in, config.block_in)
    rows_Ri = _normed(x_Ri, norm_i, epsilon)
    columns = -len(x_Ri) % _COLUMNS
    inputs = {
        "weight": values_Poi,
        "rows": jnp.pad(rows_Ri, ((0, columns), (0, 0))),
    }
    if scale is not None:
        inputs["scale"] = scale.reshape(parts, width_out)
    if accelerator is not None:
        inputs["latent"], inputs["up"] = _low_rank(rows_Ri, accelerator, slow, parts)
        inputs["latent"] = jnp.pad(inputs["latent"], ((0, 0), (0, columns), (0, 0)))
    dtype = x_Ri.dtype
    if residual_Ro is not None:
        dtype = residual_Ro.dtype
        inputs["residual"] = jnp.pad(residual_Ro.T, ((0, 0), (0, columns)))
    y_oR = plgpu.kernel(
        functools.partial(_kernel, tuple(inputs), config),
        out_type=jax.ShapeDtypeStruct((width_out, len(x_Ri) + columns), dtype),
        grid=(tiles,),
        grid_names=("tile",),
    )(*inputs.values())
    return y_oR[:, : len(x_Ri)].T


def _normed(x_Ri, norm_i, epsilon: float) -> jax.Array:
    """The rows after RMSNorm, if there is one."""
    if norm_i is None:
        return x_Ri
    x_f32 = x_Ri.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True)
    normed = x_f32 * lax.rsqrt(mean_square + epsilon) * norm_i.astype(jnp.float32)
    return normed.astype(x_Ri.dtype)


def _low_rank(rows_Ri, accelerator, slow: int, parts: int):
    """Latents `p A` of all rows, 0 for slow ones, and `up`, in whole blocks of rank."""
    down, up = (
        leaf.astype(rows_Ri.dtype).reshape(parts, *leaf.shape[-2:])
        for leaf in accelerator
    )
    rank = up.shape[1]
    latent = jnp.einsum(
        "ri,pik->prk", rows_Ri, down, preferred_element_type=jnp.float32
    )
    is_fast = jnp.arange(len(rows_Ri))[:, None] >= slow
    latent = jnp.where(is_fast, latent, 0).astype(rows_Ri.dtype)
    missing = -rank % _BLOCK_RANK
    return (
        jnp.pad(latent, ((0, 0), (0, 0), (0, missing))),
        jnp.pad(up, ((0, 0), (0, missing), (0, 0))),
    )


def _kernel(names: tuple[str, ...], config: Config, *refs) -> None:
    """64 outputs of all rows, transposed.

    Args:
      names: what each of `refs` but the last is: weight `[P, out, in]`, rows
        `[R, in]`, scale `[P, out]`, latent `[P, R, r]`, up `[P, r, out]`, residual
        `[out, R]`; those that are not needed are missing. The last is the output
        `[out, R]`. All in global memory.
      config: block sizes.
    """
    *inputs, out_ref = refs
    ref = dict(zip(names, inputs, strict=True))
    tile = lax.axis_index("tile")
    outputs = pl.ds(tile * WARPGROUP_ROWS, WARPGROUP_ROWS)
    parts = range(ref["weight"].shape[0])
    sums = [_part_sum(ref, part, tile, config) for part in parts]
    y = sums[0]
    if len(sums) == 2:
        y = sums[0] / (1 + jnp.exp(-sums[0])) * sums[1]
    if "residual" in ref:
        residual = plgpu.load(
            ref["residual"],
            (outputs, slice(None)),
            layout=plgpu.Layout.WGMMA,
            optimized=False,
        )
        y = residual.astype(jnp.float32) + y
    out_ref[outputs, :] = y.astype(out_ref.dtype)


def _part_sum(ref: dict, part: int, tile, config: Config) -> jax.Array:
    """Product of one weight's 64 outputs and all rows, f32: `[64, R]`."""
    sums = _products(ref["weight"].at[part], ref["rows"], tile, config, 1)
    if "scale" in ref:
        scale = plgpu.load(
            ref["scale"].at[part],
            (pl.ds(tile * WARPGROUP_ROWS, WARPGROUP_ROWS),),
            layout=plgpu.Layout.WGMMA.reduce(1),
            optimized=False,
        )
        sums = sums * lax.broadcast_in_dim(scale, sums.shape, [0])
    if "latent" in ref:
        rank = Config(_BLOCK_RANK, 2)
        sums = sums + _products(
            ref["up"].at[part], ref["latent"].at[part], tile, rank, 0
        )
    return sums


def _products(matrix, rows, tile, config: Config, axis: int) -> jax.Array:
    """Sums over a matrix's axis, in steps that are loaded ahead: `[64, R]`."""
    shape = (WARPGROUP_ROWS, config.block_in)

    def step(_, matrix_ref, rows_ref, acc_ref):
        if axis == 0:
            matrix_ref = transposed(matrix_ref)
        if matrix_ref.dtype == jnp.int8:
            matrix_ref = matrix_ref[...].astype(rows_ref.dtype)
        plgpu.wgmma(acc_ref, matrix_ref, transposed(rows_ref))
        plgpu.wgmma_wait(0)

    def accumulate(acc_ref):
        plgpu.emit_pipeline(
            lambda *step_refs: step(*step_refs, acc_ref),
            grid=(rows.shape[1] // config.block_in,),
            in_specs=[
                mosaic_gpu.block(
                    shape if axis == 1 else shape[::-1],
                    lambda k: (tile, k) if axis == 1 else (k, tile),
                    matrix.dtype,
                ),
                mosaic_gpu.block(
                    (rows.shape[0], config.block_in), lambda k: (0, k), rows.dtype
                ),
            ],
            max_concurrent_steps=config.steps,
        )(matrix, rows)
        return acc_ref[...]

    sums = plgpu.ACC((WARPGROUP_ROWS, rows.shape[0]), jnp.float32)
    return pl.run_scoped(accumulate, sums)

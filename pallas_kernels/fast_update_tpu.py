"""The fused fast-rate update on TPU.

The grid runs over tiles of outputs, each with all inputs of its weights: it is copied
while the tile before is multiplied. Rows, and the small matrix `A`, stay in VMEM; norm
and `p A` are done once, at the first tile.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu_layout import LANES, as_stored, check_vmem, dot, padded

# A tile is large enough to hide a grid step's fixed cost (about a third of a
# microsecond) and, in small weights, small enough that most of them overlap.
_LARGEST_TILE, _SMALLEST_TILE, _TILES = 2 * 2**20, 2**18, 8


@dataclasses.dataclass(frozen=True)
class Config:
    """Block sizes.

    Attributes:
      block_out: outputs of a tile, a multiple of 128.
    """

    block_out: int

    def __post_init__(self):
        if self.block_out < 1 or self.block_out % LANES:
            raise ValueError(
                f"block_out {self.block_out} must be a multiple of {LANES}, the "
                "lanes of a register"
            )


def heuristic(width_out: int, row_bytes: int) -> Config:
    """Block sizes without measuring.

    Args:
      width_out: outputs of the weight.
      row_bytes: bytes of the weight for one output, gate and up together.
    """
    tile = width_out * row_bytes // _TILES
    tile = min(max(tile, _SMALLEST_TILE), _LARGEST_TILE)
    blocks = tile // (row_bytes * LANES)
    return Config(min(max(LANES * blocks, LANES), padded(width_out, LANES)))


def search_space(width_out: int) -> tuple[Config, ...]:
    """Block sizes worth measuring for a weight of so many outputs."""
    sizes = (LANES * 2**power for power in range(5))
    return tuple(Config(size) for size in sizes if size < 2 * width_out)


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
    interpret: bool = False,
) -> jax.Array:
    """The kernel; arguments as in `fast_update.fast_update`."""
    values, scale = weight if isinstance(weight, tuple) else (weight, None)
    values_Poi = values.reshape(-1, *values.shape[-2:])
    parts, width_out, width_in = values_Poi.shape
    row_bytes = parts * width_in * values.dtype.itemsize
    config = config or heuristic(width_out, row_bytes)
    block = min(config.block_out, width_out)
    operand = x_Ri.dtype if scale is not None else values.dtype
    vectors = (scale, residual_Ro, norm_i)
    inputs, axes = _inputs(x_Ri, values_Poi, accelerator, vectors, operand, block)
    scratch = {"rows": pltpu.VMEM(x_Ri.shape, operand)}
    if accelerator is not None:
        latent = (parts, len(x_Ri), accelerator.down.shape[-1])
        scratch["latent"] = pltpu.VMEM(latent, operand)
    out = jax.ShapeDtypeStruct(
        (len(x_Ri), width_out), (x_Ri if residual_Ro is None else residual_Ro).dtype
    )
    arrays, specs = zip(*inputs.values(), strict=True)
    return pl.pallas_call(
        functools.partial(
            _kernel, (*inputs, "out", *scratch), axes, slow=slow, epsilon=epsilon
        ),
        grid=(pl.cdiv(width_out, block),),
        in_specs=specs,
        out_specs=_tiled(out, -1, block),
        out_shape=out,
        scratch_shapes=tuple(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            # Later tiles read what the first one prepared.
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=_vmem(x_Ri, block, row_bytes, accelerator),
        ),
        cost_estimate=_cost(arrays, out, values_Poi, accelerator, slow),
        interpret=interpret,
        name="fast_update",
    )(*arrays)


def _inputs(x_Ri, values_Poi, accelerator, vectors, operand, block):
    """The kernel's inputs by name.

    Returns:
      Arrays with their blocks, and the axis of each matrix that a product sums over.
    """
    parts, width_out, _ = values_Poi.shape
    scale, residual_Ro, norm_i = vectors
    # Matrices with the axis of their outputs.
    matrices = {"weight": (values_Poi, -2)}
    if accelerator is not None:
        for name, leaf in zip(("down", "up"), accelerator, strict=True):
            leaf = leaf.astype(operand).reshape(parts, *leaf.shape[-2:])
            matrices[name] = (leaf, -1)
    inputs, axes = {"x": (x_Ri, _whole(x_Ri))}, {}
    for name, (matrix, outputs) in matrices.items():
        matrix, outputs = as_stored(matrix, outputs)
        whole = name == "down"
        spec = _whole(matrix) if whole else _tiled(matrix, outputs, block)
        inputs[name] = matrix, spec
        axes[name] = -3 - outputs
    if norm_i is not None:
        inputs["norm"] = norm_i[None], _whole(norm_i[None])
    if scale is not None:
        scale_Po = scale.reshape(parts, width_out)
        inputs["scale"] = scale_Po, _tiled(scale_Po, -1, block)
    if residual_Ro is not None:
        inputs["residual"] = residual_Ro, _tiled(residual_Ro, -1, block)
    return inputs, axes


def _whole(array) -> pl.BlockSpec:
    """An array that does not change from tile to tile, so needs no second buffer."""
    return pl.BlockSpec(
        array.shape, lambda tile: (0,) * array.ndim, pipeline_mode=pl.Buffered(1)
    )


def _tiled(array, axis: int, block: int) -> pl.BlockSpec:
    """An array of which each tile has its own block along one axis."""
    axis %= len(array.shape)
    shape = tuple(block if i == axis else n for i, n in enumerate(array.shape))
    return pl.BlockSpec(
        shape, lambda tile: tuple(tile if i == axis else 0 for i in range(len(shape)))
    )


def _kernel(
    names: tuple[str, ...], axes: dict, *refs, slow: int, epsilon: float
) -> None:
    """One tile of outputs.

    Args:
      names: what each of `refs` is: x `[R, in]`, weight `[P, block, in]`, down
        `[P, in, r]`, up `[P, r, block]`, norm `[1, in]`, scale `[P, block]`, residual
        `[R, block]`, out `[R, block]`, rows `[R, in]` and latent `[P, R, r]`; those
        that are not needed are missing.
      axes: which axis products sum over, of matrices; they may lie transposed.
      slow: leading rows without the low-rank term.
      epsilon: of the norm.
    """
    ref = dict(zip(names, refs, strict=True))

    @pl.when(pl.program_id(0) == 0)
    def _():
        _prepare(ref, axes, epsilon)

    sums = [_tile_sum(ref, axes, part, slow) for part in range(ref["weight"].shape[0])]
    y = sums[0] if len(sums) == 1 else jax.nn.silu(sums[0]) * sums[1]
    if "residual" in ref:
        y = ref["residual"][...].astype(jnp.float32) + y
    ref["out"][...] = y.astype(ref["out"].dtype)


def _prepare(ref: dict, axes: dict, epsilon: float) -> None:
    """Normalised rows in the operands' dtype, and their low-rank latents."""
    rows = ref["x"][...]
    if "norm" in ref:
        x_f32 = rows.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True)
        scaled = x_f32 * lax.rsqrt(mean_square + epsilon)
        rows = (scaled * ref["norm"][...].astype(jnp.float32)).astype(rows.dtype)
    rows = rows.astype(ref["rows"].dtype)
    ref["rows"][...] = rows
    if "latent" in ref:
        for part in range(ref["down"].shape[0]):
            latent = dot(rows, ref["down"][part], axes["down"])
            ref["latent"][part] = latent.astype(ref["latent"].dtype)


def _tile_sum(ref: dict, axes: dict, part: int, slow: int) -> jax.Array:
    """Product of all rows and a tile, with the low-rank term of fast ones: f32."""
    rows = ref["rows"][...]
    y = dot(rows, ref["weight"][part].astype(rows.dtype), axes["weight"])
    if "scale" in ref:
        y = y * ref["scale"][part : part + 1, :]
    if "latent" in ref:
        # Rows are masked, not split: a register holds eight of them, and a matrix unit
        # multiplies so few no faster. Slow rows keep their bits whatever `up` holds.
        fast = dot(ref["latent"][part], ref["up"][part], axes["up"])
        is_fast = lax.broadcasted_iota(jnp.int32, y.shape, 0) >= slow
        y = jnp.where(is_fast, y + fast, y)
    return y


def _vmem(x_Ri, block: int, row_bytes: int, accelerator) -> int:
    """Bytes of VMEM: two tiles and one as operands, what stays, sums, and room."""
    rows, width_in = max(len(x_Ri), 16), x_Ri.shape[1]
    low_rank = 0
    if accelerator is not None:
        low_rank = 4 * accelerator.down.size + 12 * accelerator.down.shape[-1] * block
    tiles, sums = 4 * block * row_bytes, 16 * rows * block * 4
    need = tiles + sums + 3 * rows * width_in * 4 + 2 * low_rank + 8 * 2**20
    what = f"{len(x_Ri)} rows of {width_in} inputs, {block} outputs a tile,"
    return check_vmem(need, what)


def _cost(arrays, out, values_Poi, accelerator, slow: int) -> pl.CostEstimate:
    """What the compiler's scheduler is told: each array moves once."""
    flops = 2 * out.shape[0] * values_Poi.size
    if accelerator is not None:
        flops += 2 * (out.shape[0] - slow) * sum(leaf.size for leaf in accelerator)
    moved = sum(array.size * array.dtype.itemsize for array in (*arrays, out))
    return pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=0)

"""Decode attention on TPU.

The grid runs over sequences and, inside, over tiles of slots. A tile holds all heads of
its slots; running maximum, sum and output of every query stay in VMEM. Tiles outside
`start..stop` are neither copied nor computed. Heads narrower than 128 lie transposed in
memory (see `tpu_layout`), and are read that way.
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

# Rows of a register.
_SUBLANES = 8
# Bytes of keys that a tile aims at: enough to hide a grid step's fixed cost.
_TILE_BYTES = 2**20
# Where a running maximum starts: finite, so that no difference of two is a NaN.
_FLOOR = -1e30


@dataclasses.dataclass(frozen=True)
class Config:
    """Block sizes.

    Attributes:
      block_slots: cache slots of a tile, a multiple of 128.
    """

    block_slots: int

    def __post_init__(self):
        if self.block_slots < 1 or self.block_slots % LANES:
            raise ValueError(
                f"block_slots {self.block_slots} must be a multiple of {LANES}, the "
                "lanes of a register"
            )


def heuristic(slots: int, slot_bytes: int) -> Config:
    """Block sizes without measuring.

    Args:
      slots: of the cache (S).
      slot_bytes: bytes of one slot's keys, all heads.
    """
    blocks = _TILE_BYTES // (slot_bytes * LANES)
    return Config(LANES * min(max(blocks, 1), 8, -(-slots // LANES)))


def search_space(slots: int) -> tuple[Config, ...]:
    """Block sizes worth measuring for a cache of so many slots."""
    sizes = (LANES * 2**power for power in range(5))
    return tuple(Config(size) for size in sizes if size < 2 * slots)


def run(
    q_BRKGH,
    keys_JSH,
    values_JSH,
    mask_BRS,
    start_B,
    stop_B,
    *,
    scale: float,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The kernel; arguments as in `decode_attention.decode_attention`."""
    B, R, K, G, H = q_BRKGH.shape
    S = keys_JSH.shape[1]
    slot_bytes = K * H * keys_JSH.dtype.itemsize
    config = config or heuristic(S, slot_bytes)
    block = min(config.block_slots, S)
    # Rows fill whole registers, so that those of a group share the mask by a reshape.
    rows = padded(R, _SUBLANES)
    padding = ((0, 0), (0, rows - R))
    q = jnp.pad(q_BRKGH.astype(keys_JSH.dtype), (*padding, *((0, 0),) * 3))
    q_BKrH = q.transpose(0, 2, 3, 1, 4).reshape(B, K, G * rows, H)
    mask_BrS = jnp.pad(mask_BRS.astype(jnp.int8), (*padding, (0, 0)))
    keys, slot_axis = as_stored(keys_JSH.reshape(B, K, S, H), -2)
    values, _ = as_stored(values_JSH.reshape(B, K, S, H), -2)
    tiled = functools.partial(_tiled, slots=S, block=block)
    cache_spec = tiled(keys, slot_axis)
    rows_spec = pl.BlockSpec((1, K, G * rows, H), lambda b, *_: (b, 0, 0, 0))
    moved = (keys, values, mask_BrS, q_BKrH, q_BKrH)
    out_BKrH = pl.pallas_call(
        functools.partial(_kernel, scale=scale, slots=S, slot_axis=slot_axis),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, pl.cdiv(S, block)),
            in_specs=[rows_spec, cache_spec, cache_spec, tiled(mask_BrS, -1)],
            out_specs=rows_spec,
            scratch_shapes=[
                pltpu.VMEM((K, G * rows, LANES), jnp.float32),
                pltpu.VMEM((K, G * rows, LANES), jnp.float32),
                pltpu.VMEM((K, G * rows, H), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q_BKrH.shape, q_BRKGH.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=_vmem(K, G * rows, block, H, slot_bytes),
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * q_BKrH.size * S,
            bytes_accessed=sum(a.size * a.dtype.itemsize for a in moved),
            transcendentals=B * K * G * rows * S,
        ),
        interpret=interpret,
        name="decode_attention",
    )(
        start_B.astype(jnp.int32),
        stop_B.astype(jnp.int32),
        q_BKrH,
        keys,
        values,
        mask_BrS,
    )
    out = out_BKrH.reshape(B, K, G, rows, H)[:, :, :, :R]
    return out.transpose(0, 3, 1, 2, 4).reshape(B, R, K * G * H)


def _tiled(array, axis: int, *, slots: int, block: int) -> pl.BlockSpec:
    """Blocks of one sequence's slots; tiles to skip name a neighbour, not copied again.

    Args:
      array: first axis the batch.
      axis: that of slots.
      slots: of the cache.
      block: slots of a tile.
    """
    axis %= array.ndim
    shape = [1, *array.shape[1:]]
    shape[axis] = block

    def index(b, tile, start, stop):
        # `//` of traced values would ask for the TPU, which may not be here yet.
        last = lax.div(jnp.clip(stop[b] - 1, 0, slots - 1), block)
        first = jnp.minimum(lax.div(jnp.maximum(start[b], 0), block), last)
        place = [b, *(0,) * (len(shape) - 1)]
        place[axis] = jnp.clip(tile, first, last)
        return tuple(place)

    return pl.BlockSpec(tuple(shape), index)


def _kernel(
    start_ref,  # [B]
    stop_ref,  # [B]
    q_ref,  # [1, K, G * rows, H]
    keys_ref,  # [1, K, block, H] or [1, K, H, block]
    values_ref,  # likewise
    mask_ref,  # [1, rows, block]
    out_ref,  # [1, K, G * rows, H]
    largest_ref,  # [K, G * rows, 128], all lanes alike
    sum_ref,  # [K, G * rows, 128], all lanes alike
    mixed_ref,  # [K, G * rows, H]
    *,
    scale: float,
    slots: int,
    slot_axis: int,
) -> None:
    """One tile of slots of one sequence."""
    b, tile = pl.program_id(0), pl.program_id(1)
    block = keys_ref.shape[slot_axis]
    start, stop = start_ref[b], jnp.minimum(stop_ref[b], slots)

    @pl.when(tile == 0)
    def _():
        largest_ref[...] = jnp.full_like(largest_ref, _FLOOR)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        mixed_ref[...] = jnp.zeros_like(mixed_ref)

    @pl.when((tile * block < stop) & ((tile + 1) * block > start))
    def _():
        rows = mask_ref.shape[1]
        slot = tile * block + lax.broadcasted_iota(jnp.int32, (rows, block), 1)
        inside = (slot >= start) & (slot < stop)
        reads = (mask_ref[0].astype(jnp.int32) != 0) & inside
        column = (block, 1) if slot_axis == -2 else (1, block)
        slot = tile * block + lax.broadcasted_iota(jnp.int32, column, slot_axis % 2)
        written = (slot >= start) & (slot < stop)
        for head in range(keys_ref.shape[1]):
            values = values_ref[0, head]
            # A weight of 0 does not silence a NaN of a slot that nobody wrote.
            values = jnp.where(written, values.astype(jnp.float32), 0)
            values = values.astype(values_ref.dtype)
            state = largest_ref.at[head], sum_ref.at[head], mixed_ref.at[head]
            scores = dot(q_ref[0, head], keys_ref[0, head], -3 - slot_axis) * scale
            _carry_on(scores, reads, values, slot_axis, *state)

    @pl.when(tile == pl.num_programs(1) - 1)
    def _():
        for head in range(keys_ref.shape[1]):
            total = sum_ref[head, :, :1]
            mixed = mixed_ref[head] / jnp.where(total == 0, 1.0, total)
            out_ref[0, head] = mixed.astype(out_ref.dtype)


def _carry_on(
    scores, reads, values, slot_axis: int, largest_ref, sum_ref, mixed_ref
) -> None:
    """Takes a tile's scores `[G * rows, block]` into the running softmax of a head."""
    queries, block = scores.shape
    rows = reads.shape[0]
    reads = jnp.broadcast_to(reads[None], (queries // rows, rows, block))
    reads = reads.reshape(queries, block)
    before = largest_ref[:, :1]
    scores = jnp.where(reads, scores, _FLOOR)
    largest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.where(reads, jnp.exp(scores - largest), 0.0)
    shrink = jnp.exp(before - largest)
    total = shrink * sum_ref[:, :1] + jnp.sum(weights, axis=1, keepdims=True)
    largest_ref[...] = jnp.broadcast_to(largest, largest_ref.shape)
    sum_ref[...] = jnp.broadcast_to(total, sum_ref.shape)
    mixed = dot(weights.astype(values.dtype), values, slot_axis)
    mixed_ref[...] = shrink * mixed_ref[...] + mixed


def _vmem(heads: int, queries: int, block: int, head_dim: int, slot_bytes: int) -> int:
    """Bytes of VMEM: two tiles of keys and of values, what is carried, and room."""
    lanes = padded(head_dim, LANES)
    state = heads * queries * (2 * LANES + 5 * lanes) * 4
    tiles = 8 * block * slot_bytes
    need = tiles + state + 12 * queries * block * 4 + 8 * 2**20
    what = f"{queries} queries a head and tiles of {block} slots of {heads} heads"
    return check_vmem(need, what)

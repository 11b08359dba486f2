"""Decode attention on Hopper GPUs.

One head's slots are split among blocks of threads, which one sequence alone would not
keep busy otherwise. Each block has 64 queries of the head (rows times group, padded)
and leaves an unfinished softmax: its largest score, sum and output; XLA puts them
together.
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

# Blocks of threads to aim at: two for each of a Hopper's 132 processors.
_BLOCKS = 264
# Where a running maximum starts: finite, so that no difference of two is a NaN.
_FLOOR = -1e30


@dataclasses.dataclass(frozen=True)
class Config:
    """Block sizes.

    Attributes:
      block_slots: cache slots of a step, a multiple of 64.
      splits: blocks of threads that share a head's slots.
      steps: how many steps are loaded ahead.
    """

    block_slots: int
    splits: int
    steps: int


def heuristic(heads: int, slots: int) -> Config:
    """Block sizes without measuring.

    Args:
      heads: key/value heads of all sequences (J).
      slots: of the cache (S).
    """
    most = slots // WARPGROUP_ROWS
    return Config(WARPGROUP_ROWS, min(max(_BLOCKS // heads, 1), max(most, 1)), 2)


def search_space(heads: int, slots: int) -> tuple[Config, ...]:
    """Block sizes worth measuring for so many heads and slots."""
    most = heuristic(heads, slots).splits
    counts = sorted({max(most // share, 1) for share in (1, 2, 4)})
    return tuple(Config(64, splits, steps) for splits in counts for steps in (2, 3))


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
) -> jax.Array:
    """The kernel; arguments as in `decode_attention.decode_attention`."""
    mosaic_gpu.check_backend()
    mosaic_gpu.check_bfloat16("keys and values", keys_JSH, values_JSH)
    B, R, K, G, H = q_BRKGH.shape
    J, S, _ = keys_JSH.shape
    config = config or heuristic(J, S)
    mosaic_gpu.whole_blocks("slots", S, config.block_slots)
    mosaic_gpu.whole_blocks("a head's width", H, 32)
    q_JrH = q_BRKGH.swapaxes(1, 2).reshape(J, R * G, H).astype(keys_JSH.dtype)
    reads_BrS = jnp.repeat(mask_BRS.astype(jnp.int8), G, axis=1)
    missing = ((0, 0), (0, -R * G % WARPGROUP_ROWS), (0, 0))
    q_JrH, reads_BrS = jnp.pad(q_JrH, missing), jnp.pad(reads_BrS, missing)
    queries = q_JrH.shape[1]
    # First step and number of steps of each split of each sequence.
    first_B = jnp.clip(start_B, 0, S) // config.block_slots
    steps_B = jnp.maximum(
        pl.cdiv(jnp.clip(stop_B, 0, S), config.block_slots) - first_B, 0
    )
    share_B = pl.cdiv(steps_B, config.splits)
    begin_Bs = jnp.arange(config.splits) * share_B[:, None]
    count_Bs = jnp.clip(steps_B[:, None] - begin_Bs, 0, share_B[:, None])
    span_B4 = jnp.stack([start_B, stop_B], axis=-1)
    partial = (J, config.splits, queries)
    largest, total, mixed = plgpu.kernel(
        functools.partial(_kernel, config, K, scale),
        out_type=(
            jax.ShapeDtypeStruct(partial, jnp.float32),
            jax.ShapeDtypeStruct(partial, jnp.float32),
            jax.ShapeDtypeStruct((*partial, H), jnp.float32),
        ),
        grid=(J, config.splits, queries // WARPGROUP_ROWS),
        grid_names=("head", "split", "queries"),
    )(
        q_JrH,
        keys_JSH,
        values_JSH,
        reads_BrS,
        span_B4.astype(jnp.int32),
        (first_B[:, None] + begin_Bs).astype(jnp.int32),
        count_Bs.astype(jnp.int32),
    )
    return _combine(largest, total, mixed, q_BRKGH)


def _combine(largest_Jsr, total_Jsr, mixed_JsrH, q_BRKGH) -> jax.Array:
    """One softmax from those of all splits: `[B, R, K*G*H]`."""
    B, R, K, G, H = q_BRKGH.shape
    weights_Jsr = jnp.exp(largest_Jsr - largest_Jsr.max(1, keepdims=True))
    total_Jr = jnp.sum(weights_Jsr * total_Jsr, axis=1)
    mixed_JrH = jnp.sum(weights_Jsr[..., None] * mixed_JsrH, axis=1)
    mixed_JrH = mixed_JrH / jnp.where(total_Jr == 0, 1.0, total_Jr)[..., None]
    mixed = mixed_JrH[:, : R * G].reshape(B, K, R, G * H)
    return mixed.swapaxes(1, 2).reshape(B, R, K * G * H).astype(q_BRKGH.dtype)


def _kernel(
    config: Config,
    kv_heads: int,
    scale: float,
    q_ref,  # [J, queries, H]
    keys_ref,  # [J, S, H]
    values_ref,  # [J, S, H]
    reads_ref,  # int8[B, queries, S]
    span_ref,  # [B, 2], start and stop
    first_ref,  # [B, splits], first step
    count_ref,  # [B, splits], number of steps
    largest_ref,  # [J, splits, queries]
    total_ref,  # [J, splits, queries]
    mixed_ref,  # [J, splits, queries, H]
) -> None:
    """64 queries of a head over one split of its slots. All refs in global memory."""
    head, split = lax.axis_index("head"), lax.axis_index("split")
    block_index = lax.axis_index("queries")
    queries = pl.ds(block_index * WARPGROUP_ROWS, WARPGROUP_ROWS)
    sequence = lax.div(head, kv_heads)
    H = q_ref.shape[-1]
    span = span_ref[sequence, 0], span_ref[sequence, 1]
    first = first_ref[sequence, split]

    def with_queries(q_block, barrier):
        plgpu.copy_gmem_to_smem(q_ref.at[head, queries], q_block, barrier)
        plgpu.barrier_wait(barrier)
        step = functools.partial(_step, q_block, config, scale, first, span)
        return plgpu.emit_pipeline(
            step,
            grid=(count_ref[sequence, split],),
            in_specs=[
                mosaic_gpu.block(
                    (config.block_slots, H), lambda k: (first + k, 0), keys_ref.dtype
                ),
                mosaic_gpu.block(
                    (config.block_slots, H), lambda k: (first + k, 0), keys_ref.dtype
                ),
                plgpu.BlockSpec(
                    (WARPGROUP_ROWS, config.block_slots),
                    lambda k: (block_index, first + k),
                ),
            ],
            max_concurrent_steps=config.steps,
            init_carry=_nothing_read(H),
        )(keys_ref.at[head], values_ref.at[head], reads_ref.at[sequence])

    q_spec = mosaic_gpu.block((WARPGROUP_ROWS, H), None, q_ref.dtype)
    largest, total, mixed = pl.run_scoped(
        with_queries,
        plgpu.SMEM((WARPGROUP_ROWS, H), q_ref.dtype, transforms=q_spec.transforms),
        plgpu.Barrier(),
    )
    largest_ref[head, split, queries] = largest
    total_ref[head, split, queries] = total
    mixed_ref[head, split, queries] = mixed


def _nothing_read(head_dim: int):
    """The running softmax of 64 queries at its start: largest, sum, output."""
    row = plgpu.Layout.WGMMA.reduce(1)
    return (
        plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), _FLOOR, jnp.float32), row),
        plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), row),
        plgpu.layout_cast(
            jnp.zeros((WARPGROUP_ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA
        ),
    )


def _step(
    q_ref, config, scale, first, span, index, keys_ref, values_ref, reads_ref, carry
):
    """Takes one step's slots into the running softmax."""
    largest, total, mixed = carry
    start, stop = span
    shape = (WARPGROUP_ROWS, config.block_slots)

    def scores_of(acc_ref):
        plgpu.wgmma(acc_ref, q_ref, transposed(keys_ref))
        plgpu.wgmma_wait(0)
        return acc_ref[...]

    scores = pl.run_scoped(scores_of, plgpu.ACC(shape, jnp.float32)) * scale
    offset = (first + index[0]) * config.block_slots
    slots = offset + _slot_numbers(shape, 1)
    reads = plgpu.load(reads_ref, (), layout=plgpu.Layout.WGMMA, optimized=False)
    reads = (reads.astype(jnp.int32) != 0) & (slots >= start) & (slots < stop)
    scores = jnp.where(reads, scores, _FLOOR)
    new_largest = jnp.maximum(largest, scores.max(axis=1))
    shrink = jnp.exp(largest - new_largest)
    # A row that reads nothing here has every score at the floor: no weight at all.
    weights = jnp.exp(scores - lax.broadcast_in_dim(new_largest, shape, [0]))
    weights = jnp.where(reads, weights, 0.0)
    total = total * shrink + weights.sum(axis=1)
    mixed = mixed * lax.broadcast_in_dim(shrink, mixed.shape, [0])

    # A weight of 0 does not silence a NaN of a slot that nobody wrote.
    @pl.when((offset < start) | (offset + config.block_slots > stop))
    def _():
        wide = values_ref.shape
        slots = offset + _slot_numbers(wide, 0)
        values = plgpu.load(values_ref, (), layout=plgpu.Layout.WGMMA)
        values_ref[...] = jnp.where((slots >= start) & (slots < stop), values, 0)
        plgpu.commit_smem()

    def mix(acc_ref):
        plgpu.wgmma(acc_ref, weights.astype(values_ref.dtype), values_ref)

    mixed = pl.run_state(mix)(plgpu.ACC.init(mixed))
    return new_largest, total, mixed


def _slot_numbers(shape: tuple[int, int], axis: int) -> jax.Array:
    """Numbers along one axis, in the registers of a matrix unit's result."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

"""Decode attention: slow and fast rows of a token on the shared cache, read once.

Fast rows have queries only and read the slow stream's keys and values, so all rows of a
pass can share each tile of the cache: it is brought into fast memory once, for all rows
and all queries of a group, and the softmax is carried on from tile to tile.

This file holds the contract and the reference; kernels lie in `decode_attention_tpu`
and `decode_attention_gpu`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import decode_attention_gpu, decode_attention_tpu
from pallas_kernels.dispatch import dispatch
from pallas_kernels.products import product

MAX_ROWS = 128


def decode_attention(
    q_BRKGH: jax.Array,
    keys_JSH: jax.Array,
    values_JSH: jax.Array,
    mask_BRS: jax.Array,
    *,
    start_B: jax.Array | None = None,
    stop_B: jax.Array | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    config: decode_attention_tpu.Config | decode_attention_gpu.Config | None = None,
) -> jax.Array:
    """Grouped-query attention of few rows over the slots of a cache.

    The mask alone says who reads what: trees of drafts, sliding windows, slots not
    committed. `start_B` and `stop_B` let kernels skip whole tiles: no row of a sequence
    reads a slot outside them, whatever the mask says there. With a sliding window of W
    slots, `start` is the first slot in the window of the earliest row.

    Args:
      q_BRKGH: 1..128 queries, rotated, grouped by the head they read.
      keys_JSH: keys in the cache's layout.
      values_JSH: values, likewise. Slots outside `start..stop` may hold anything;
        those inside that a row does not read are multiplied by 0, so must be finite.
      mask_BRS: bool, True where a row may read a slot. A row that reads none gets 0.
      start_B: first slot that any row reads; 0 by default.
      stop_B: one past the last; S by default.
      scale: of the scores; `H**-0.5` by default.
      implementation: as in `fast_update`.
      config: block sizes of the kernel; its own choice by default.

    Returns:
      `[B, R, K*G*H]` in the queries' dtype. Scores, softmax and sums are f32.

    Raises:
      ValueError: shapes that do not belong together.
      NotImplementedError: what a named kernel cannot serve.
    """
    _validate(q_BRKGH, keys_JSH, values_JSH, mask_BRS)
    B, _, _, _, H = q_BRKGH.shape
    S = keys_JSH.shape[1]
    start_B = jnp.zeros((B,), jnp.int32) if start_B is None else start_B
    stop_B = jnp.full((B,), S, jnp.int32) if stop_B is None else stop_B
    scale = H**-0.5 if scale is None else scale
    call = (q_BRKGH, keys_JSH, values_JSH, mask_BRS, start_B, stop_B)
    tpu = functools.partial(decode_attention_tpu.run, *call, scale=scale, config=config)
    return dispatch(
        {
            "reference": functools.partial(reference, *call, scale=scale),
            "tpu": tpu,
            "gpu": functools.partial(
                decode_attention_gpu.run, *call, scale=scale, config=config
            ),
            "interpret": functools.partial(tpu, interpret=True),
        },
        implementation,
    )


def reference(
    q_BRKGH, keys_JSH, values_JSH, mask_BRS, start_B, stop_B, *, scale: float
) -> jax.Array:
    """The contract in jax.numpy; arguments as in `decode_attention`."""
    B, R, K, G, H = q_BRKGH.shape
    keys_BKSH, values_BKSH = (
        cached.reshape(B, K, *cached.shape[1:]) for cached in (keys_JSH, values_JSH)
    )
    slots = jnp.arange(keys_BKSH.shape[2])
    inside_BS = (slots >= start_B[:, None]) & (slots < stop_B[:, None])
    reads_BRS = mask_BRS & inside_BS[:, None]
    scores = product(q_BRKGH, keys_BKSH, "brkgh,bksh->bkrgs") * scale
    reads = reads_BRS[:, None, :, None]
    weights = jnp.where(reads, jax.nn.softmax(scores, where=reads, axis=-1), 0)
    # A weight of 0 does not silence a NaN of a slot that nobody wrote.
    values_BKSH = jnp.where(inside_BS[:, None, :, None], values_BKSH, 0)
    weights = weights.astype(values_BKSH.dtype)
    out = product(weights, values_BKSH, "bkrgs,bksh->brkgh")
    return out.reshape(B, R, K * G * H).astype(q_BRKGH.dtype)


def _validate(q_BRKGH, keys_JSH, values_JSH, mask_BRS) -> None:
    """Raises ValueError where arguments do not belong together."""
    if q_BRKGH.ndim != 5 or not 1 <= q_BRKGH.shape[1] <= MAX_ROWS:
        raise ValueError(
            f"queries {q_BRKGH.shape} must be [B, R, K, G, H] with R in 1..{MAX_ROWS}"
        )
    B, R, K, _, H = q_BRKGH.shape
    S = keys_JSH.shape[1]
    for name, cached in (("keys", keys_JSH), ("values", values_JSH)):
        if cached.shape != (B * K, S, H):
            raise ValueError(f"{name} are {cached.shape}, expected {(B * K, S, H)}")
    if mask_BRS.shape != (B, R, S) or mask_BRS.dtype != jnp.bool_:
        raise ValueError(
            f"mask is {mask_BRS.dtype}{mask_BRS.shape}, expected bool{(B, R, S)}"
        )

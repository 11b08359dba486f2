"""The key/value cache: an explicit pytree, written in place, rolled back by length.

Slot s of a row holds the key and value of position s. The first `length` slots are
committed; whatever lies behind them is scratch: new rows are written there, and only
advancing `length` makes them count. Rolling back is not advancing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from m2r2_jax.models.config import ModelConfig


@struct.dataclass
class KVCache:
    """Keys and values of every layer.

    Batch and key/value heads are one axis (J = B * K, row b's heads at b*K..): both
    products of attention are batched over it, and a buffer that needs no reshape
    between its update and its use is updated in place by XLA's CPU backend; with two
    axes it was copied four times per layer and step.

    Attributes:
      keys: a tuple of L arrays `[J, S, H]` (unrolled layers), or one array
        `[L, J, S, H]` (scanned layers).
      values: likewise.
      length: `int32[B]`, committed positions of each row. Kept once, not per layer.
    """

    keys: tuple[jax.Array, ...] | jax.Array
    values: tuple[jax.Array, ...] | jax.Array
    length: jax.Array

    @property
    def capacity(self) -> int:
        """Slots per row (S)."""
        return jax.tree.leaves(self.keys)[0].shape[-2]

    def append(self, layer, k_BTKH: jax.Array, v_BTKH: jax.Array) -> KVCache:
        """Writes the rows of one layer into the slots from `length` on.

        Args:
          layer: index; a Python int for unrolled layers, may be traced for scanned.
          k_BTKH: keys of T new rows.
          v_BTKH: values of T new rows.
        """
        keys = _write(self.keys, k_BTKH, layer, self.length)
        values = _write(self.values, v_BTKH, layer, self.length)
        return self.replace(keys=keys, values=values)

    def read(self, layer) -> tuple[jax.Array, jax.Array]:
        """Keys and values `[J, S, H]` of one layer."""
        return self.keys[layer], self.values[layer]

    def advance(self, count_B: jax.Array) -> KVCache:
        """Commits the next `count` scratch slots of each row."""
        return self.replace(length=self.length + count_B)

    def commit_path(self, path_Bn: jax.Array) -> KVCache:
        """Moves the scratch slots of an accepted tree path to the front of the scratch.

        Args:
          path_Bn: scratch slots, relative to `length`, in the order to keep; entries
            past the accepted ones may be anything in range.
        """

        def gather(buffer_JSH):
            slots_Bn = self.length[:, None] + path_Bn
            slots_Jn = jnp.repeat(slots_Bn, len(buffer_JSH) // len(slots_Bn), axis=0)
            rows_JnH = jnp.take_along_axis(buffer_JSH, slots_Jn[..., None], axis=1)
            return _update(buffer_JSH, rows_JnH, self.length)

        if isinstance(self.keys, jax.Array):
            gather = jax.vmap(gather)
        keys, values = jax.tree.map(gather, (self.keys, self.values))
        return self.replace(keys=keys, values=values)


def init_cache(
    config: ModelConfig, batch: int, capacity: int, dtype, *, unrolled: bool
) -> KVCache:
    """An empty cache of `capacity` slots for `batch` rows."""
    shape = (batch * config.num_kv_heads, capacity, config.head_dim)
    length = jnp.zeros((batch,), jnp.int32)
    if not unrolled:
        stacked = (config.num_layers, *shape)
        return KVCache(jnp.zeros(stacked, dtype), jnp.zeros(stacked, dtype), length)
    keys, values = (
        tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))
        for _ in range(2)
    )
    return KVCache(keys, values, length)


def grow(cache: KVCache, capacity: int) -> KVCache:
    """The same cache with at least `capacity` slots per row; copies when it grows."""
    missing = capacity - cache.capacity
    if missing <= 0:
        return cache

    def pad(buffer):
        widths = [(0, 0)] * buffer.ndim
        widths[-2] = (0, missing)
        return jnp.pad(buffer, widths)

    keys, values = jax.tree.map(pad, (cache.keys, cache.values))
    return cache.replace(keys=keys, values=values)


def cache_layout(rows_BTKH: jax.Array) -> jax.Array:
    """Keys or values as the cache holds them: `[B, T, K, H] -> [J, T, H]`."""
    B, T, K, H = rows_BTKH.shape
    return rows_BTKH.swapaxes(1, 2).reshape(B * K, T, H)


def _write(buffers, rows_BTKH: jax.Array, layer, start_B: jax.Array):
    """Writes rows into one layer of a tuple or of a stack."""
    rows_JTH = cache_layout(rows_BTKH)
    if isinstance(buffers, tuple):
        written = _update(buffers[layer], rows_JTH, start_B)
        return buffers[:layer] + (written,) + buffers[layer + 1 :]
    if len(start_B) == 1:
        return lax.dynamic_update_slice(
            buffers, rows_JTH[None], (layer, 0, start_B[0], 0)
        )

    def update_row(stack_LSH, rows_TH, start):
        at = (layer, start, jnp.int32(0))
        return lax.dynamic_update_slice(stack_LSH, rows_TH[None], at)

    update = jax.vmap(update_row, in_axes=(1, 0, 0), out_axes=1)
    start_J = jnp.repeat(start_B, len(rows_JTH) // len(start_B))
    return update(buffers, rows_JTH, start_J)


def _update(buffer_JSH: jax.Array, rows_JTH: jax.Array, start_B: jax.Array):
    """Writes T rows from slot `start` on, in place where the buffer is donated.

    A start that leaves no room for T rows would be clamped by XLA and overwrite
    committed slots; `Session` sizes the cache so that it cannot happen.
    """
    # One sequence is the common case, and a slice update is cheaper than a scatter.
    if len(start_B) == 1:
        return lax.dynamic_update_slice(buffer_JSH, rows_JTH, (0, start_B[0], 0))

    def update_row(row_SH, rows_TH, start):
        return lax.dynamic_update_slice_in_dim(row_SH, rows_TH, start, axis=0)

    start_J = jnp.repeat(start_B, len(buffer_JSH) // len(start_B))
    return jax.vmap(update_row)(buffer_JSH, rows_JTH, start_J)

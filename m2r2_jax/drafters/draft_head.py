"""A head over some ids only, in which drafts are drawn."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from m2r2_jax.models.transformer import like_matrices


@struct.dataclass
class DraftHead:
    """A head over some ids only, for drafts; verification always uses the whole one.

    Attributes:
      weight: `[H, D]`, rows of the model's head.
      ids: `int32[H]`, the ids they stand for.
      slot: `int32[V]`, where each id stands in the head; -1 where it does not.
    """

    weight: jax.Array
    ids: jax.Array
    slot: jax.Array


def draft_head(params: dict, ids: jax.Array | None = None) -> DraftHead:
    """The rows of the model's head for these ids; without ids all of them."""
    weight = params.get("head", params["embed"])
    every = jnp.arange(len(weight), dtype=jnp.int32)
    if ids is None:
        return DraftHead(weight, every, every)
    ids = jnp.asarray(ids, jnp.int32)
    slot = jnp.full(len(weight), -1, jnp.int32).at[ids].set(every[: len(ids)])
    return DraftHead(like_matrices(params, weight[ids]), ids, slot)

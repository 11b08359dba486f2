"""A head over some ids only, in which drafts are drawn."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from m2r2_jax.models.config import ModelConfig
from m2r2_jax.models.transformer import finished_logits, like_matrices
from m2r2_jax.ops.execution import PLAIN, Execution
from m2r2_jax.ops.products import linear


@struct.dataclass
class DraftHead:
    """A head over some ids only, for drafts; verification always uses the whole one.

    Attributes:
      weight: `[H, D]`, rows of the model's head.
      ids: `int32[H]`, the ids they stand for.
      slot: `int32[V]`, where each id stands in the head; -1 where it does not.
      multiplier: of the logits, the model's.
      cap: soft cap of the logits, the model's.
    """

    weight: jax.Array
    ids: jax.Array
    slot: jax.Array
    multiplier: float = struct.field(pytree_node=False, default=1.0)
    cap: float | None = struct.field(pytree_node=False, default=None)

    def logits(
        self, states: jax.Array, execution: Execution = PLAIN, dtype=None
    ) -> jax.Array:
        """Of normalised states, as `products.linear` gives them: `[..., H]`."""
        product = linear(states, self.weight, execution, dtype)
        return finished_logits(product, self.multiplier, self.cap)


def draft_head(
    config: ModelConfig, params: dict, ids: jax.Array | None = None
) -> DraftHead:
    """The rows of the model's head for these ids; without ids all that have a text."""
    weight = params.get("head", params["embed"])
    how = config.logit_multiplier, config.logit_cap
    every = jnp.arange(len(weight), dtype=jnp.int32)
    usable = len(weight) if config.decodable is None else config.decodable
    if ids is None and usable >= len(weight):
        return DraftHead(weight, every, every, *how)
    ids = every[:usable] if ids is None else jnp.asarray(ids, jnp.int32)
    slot = jnp.full(len(weight), -1, jnp.int32).at[ids].set(every[: len(ids)])
    return DraftHead(like_matrices(params, weight[ids]), ids, slot, *how)

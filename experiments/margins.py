"""How close two choices were."""

from __future__ import annotations

import jax
import numpy as np

from m2r2_jax import Model
from m2r2_jax.models.config import Decoder
from m2r2_jax.models.transformer import forward

_forward = jax.jit(forward, static_argnums=0)


def logit_margin(model: Model, prefix: list[int]) -> float:
    """Gap between the two best logits after a prefix, from one uncached pass."""
    padded = np.zeros((1, -(-len(prefix) // 256) * 256), np.int32)
    padded[0, : len(prefix)] = prefix
    logits = _forward(Decoder(model.config), model.params, padded)
    best = np.partition(np.asarray(logits[0, len(prefix) - 1]), -2)[-2:]
    return float(best[1] - best[0])

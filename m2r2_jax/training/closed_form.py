"""A start for training that costs one solve: exit maps by ridge regression.

With untouched layers the accelerated stream is the slow one. The linear map from its
exit state and the carry to the teacher's final state is known in closed form.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from m2r2_jax.models import transformer
from m2r2_jax.models.config import ModelConfig
from m2r2_jax.models.multirate import MultiRateConfig
from m2r2_jax.training import steps
from m2r2_jax.training.losses import Batch


def closed_form_start(
    config: ModelConfig,
    rates: MultiRateConfig,
    params: dict,
    accelerators: dict,
    batches: Iterable[Batch],
    ridge: float = 100.0,
) -> dict:
    """Fresh accelerators with the maps of every exit solved on some batches.

    Args:
      config: the model.
      rates: exits.
      params: the frozen model.
      accelerators: from `init_accelerators`.
      batches: labelled rows; a few times 2 D tokens at least.
      ridge: added to the diagonal of the normal equations.
    """
    sums = None
    for batch in batches:
        found = jax.device_get(_moments(config, rates, params, batch))
        sums = found if sums is None else jax.tree.map(np.add, sums, found)
    own, carry = [], []
    for gram, cross in sums:
        gram = np.float64(gram) + ridge * np.eye(len(gram))
        solved = np.linalg.solve(gram, np.float64(cross))
        own.append(solved[: config.width])
        carry.append(solved[config.width :])
    maps = {"own": np.stack(own), "carry": np.stack(carry)}
    return {**accelerators, "exit": jax.tree.map(jnp.float32, maps)}


@functools.partial(jax.jit, static_argnames=("config", "rates"))
def _moments(config, rates, params, batch: Batch):
    """Normal equations of each exit over the trained tokens."""
    states = steps.slow_exits(config, rates, params, batch)
    teacher_BTD = batch.states.astype(jnp.float32)
    scale_D = params["final_norm"].astype(jnp.float32)
    carry_BTD = steps.previous(batch, teacher_BTD)
    weight_BT1 = batch.trained[..., None].astype(jnp.float32)

    def one(exit_BTD):
        own_BTD = transformer.final_norm(config, params, exit_BTD)
        inputs = jnp.concatenate([own_BTD, carry_BTD], axis=-1) * weight_BT1
        # The norm behind the maps takes any length: the stream's own is kept.
        size = jnp.sqrt(jnp.mean(jnp.square(exit_BTD)))
        target = (size * teacher_BTD / scale_D - exit_BTD) * weight_BT1
        flat = inputs.reshape(-1, inputs.shape[-1])
        return flat.T @ flat, flat.T @ target.reshape(-1, target.shape[-1])

    return [one(state) for state in states]

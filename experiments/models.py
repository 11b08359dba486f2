"""How the experiments that work in large batches load the model."""

from __future__ import annotations

import jax.numpy as jnp

from experiments.suite import Settings
from m2r2_jax import Model, load
from m2r2_jax.sharding import make_mesh


def load_for_batches(settings: Settings) -> Model:
    """The model with bf16 matrices and an f32 stream: large batches are bound by
    arithmetic, and matrix units have more of it in bf16.
    """
    return load(
        settings.model,
        dtype=jnp.bfloat16,
        stream_dtype=jnp.float32,
        mesh=None if settings.mesh == "data:1" else make_mesh(settings.mesh),
    )

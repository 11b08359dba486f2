"""How the experiments that work in large batches load the model."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from experiments.suite import Settings
from m2r2_jax import Model, load
from m2r2_jax.models.sharding import make_mesh
from m2r2_jax.models.transformer import matrix_dtype
from m2r2_jax.ops.cpu import has_bf16_units


def load_for_batches(settings: Settings) -> Model:
    """The model with an f32 stream, and matrices in the dtype that multiplies fastest,
    the head's too: large batches are bound by arithmetic, and matrix units have more of
    it in bf16.
    """
    model = load(
        settings.model,
        dtype=fastest_matrix_dtype(),
        stream_dtype=jnp.float32,
        mesh=None if settings.mesh == "data:1" else make_mesh(settings.mesh),
    )
    head = model.params.get("head", model.params["embed"])
    head = head.astype(matrix_dtype(model.params))
    return dataclasses.replace(model, params={**model.params, "head": head})


def fastest_matrix_dtype() -> jnp.dtype:
    """bf16 where the device has units for it, else f32.

    Without them products in bf16 took 1.6 times as long as in f32 (Zen 3), with them
    half as long. A property of the machine and not a timing, so that a run that was
    killed goes on in the same dtype.
    """
    if jax.default_backend() != "cpu":
        return jnp.bfloat16
    return jnp.bfloat16 if has_bf16_units() else jnp.float32


def batch_identity(model: Model) -> dict:
    """What results of large batches depend on beside their settings, for records."""
    return {"model": model.config.name, "matrices": str(matrix_dtype(model.params))}

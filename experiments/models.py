"""How the experiments that work in large batches load the model."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp

from experiments.suite import Settings
from m2r2_jax import Model, load
from m2r2_jax.layers import linear
from m2r2_jax.sharding import make_mesh

_WIDTH, _TRIALS = 1024, 3


def load_for_batches(settings: Settings) -> Model:
    """The model with an f32 stream, and matrices in the dtype that multiplies fastest:
    large batches are bound by arithmetic, and matrix units have more of it in bf16.
    """
    return load(
        settings.model,
        dtype=fastest_matrix_dtype(),
        stream_dtype=jnp.float32,
        mesh=None if settings.mesh == "data:1" else make_mesh(settings.mesh),
    )


def fastest_matrix_dtype() -> jnp.dtype:
    """bf16 where its products take less time than f32's, else f32.

    Measured, since a CPU either has units for bf16 and is twice as fast with it, or
    has none and is several times slower.
    """
    times = {dtype: _seconds(dtype) for dtype in (jnp.float32, jnp.bfloat16)}
    return min(times, key=times.get)


def _seconds(dtype: jnp.dtype) -> float:
    """The least time of a product of square matrices."""
    matrix = jnp.ones((_WIDTH, _WIDTH), dtype)
    product = jax.jit(linear)
    product(matrix, matrix).block_until_ready()
    times = []
    for _ in range(_TRIALS):
        started = time.perf_counter()
        product(matrix, matrix).block_until_ready()
        times.append(time.perf_counter() - started)
    return min(times)

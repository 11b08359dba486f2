"""A loaded model: config, parameters and tokenizer, and how to load one."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from m2r2_jax.checkpoints import fetch
from m2r2_jax.checkpoints.gguf import GGUFFile, config_from_gguf, load_gguf_params
from m2r2_jax.models import sharding
from m2r2_jax.models.config import ModelConfig
from m2r2_jax.ops.cpu import vector_registers
from m2r2_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """Everything that decoding needs.

    Attributes:
      config: static description.
      params: parameter tree of `transformer.weight_specs`.
      tokenizer: text to ids and back, and the chat template.
      mesh: devices the arrays are spread over; None for a single device.
    """

    config: ModelConfig
    params: dict
    tokenizer: Tokenizer
    mesh: Mesh | None = None

    @property
    def unrolled(self) -> bool:
        """Whether blocks are stored per layer (see `transformer`)."""
        return isinstance(self.params["blocks"], tuple)

    @property
    def exact(self) -> Model:
        """The same model, whose rows do not depend on each other (`ModelConfig`)."""
        return dataclasses.replace(self, config=self.config.exact)


def load(
    path: str | Path | None = None,
    *,
    dtype: jnp.dtype | None = None,
    stream_dtype: jnp.dtype | None = None,
    mesh: Mesh | None = None,
    unrolled: bool | None = None,
) -> Model:
    """Loads a model, tensor by tensor.

    Args:
      path: a GGUF file of dense Llama architecture; None is the default model,
        SmolLM2-135M-Instruct, fetched on first use.
      dtype: of the blocks' matrices; f32 on CPU and bf16 elsewhere by default. f16
        overflows in many models: it gives a warning.
      stream_dtype: of everything else, the residual stream and the cache included;
        that of the matrices by default. f32 beside bf16 matrices is what a CPU with
        bf16 units runs fastest in large batches.
      mesh: from `sharding.make_mesh`.
      unrolled: per-layer weights and an unrolled program, which is faster to run but
        longer to compile; by default everywhere but on TPU.

    Raises:
      FileNotFoundError: no such file, or the default model cannot be fetched.
      ValueError: a file that is not supported, incomplete or inconsistent.
    """
    _enable_compilation_cache()
    if jnp.float16 in (dtype, stream_dtype):
        warnings.warn(
            "float16 holds numbers up to 65504, which activations of models trained in "
            "bfloat16 exceed; use dtype=jnp.bfloat16 or jnp.float32",
            stacklevel=2,
        )
    backend = jax.default_backend()
    dtype = dtype or (jnp.float32 if backend == "cpu" else jnp.bfloat16)
    unrolled = backend != "tpu" if unrolled is None else unrolled
    file = GGUFFile(fetch.default_model_file() if path is None else path)
    name = fetch.DEFAULT_MODEL if path is None else file.path.stem
    config = dataclasses.replace(
        config_from_gguf(file),
        name=name,
        products=f"fused_{vector_registers()}" if backend == "cpu" else "plain",
    )
    tokenizer = Tokenizer.from_gguf(file.metadata)

    def place(array, axes):
        if mesh is None:
            return jnp.asarray(array)
        return jax.device_put(array, sharding.sharding(mesh, axes, array.shape))

    params = load_gguf_params(
        file,
        config,
        dtype,
        stream_dtype=stream_dtype or dtype,
        unrolled=unrolled,
        place=place,
    )
    return Model(config, params, tokenizer, mesh)


def _enable_compilation_cache() -> None:
    """Keeps compiled programs between processes, unless the user chose a place."""
    if jax.config.jax_compilation_cache_dir is None:
        folder = fetch.cache_folder() / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(folder))

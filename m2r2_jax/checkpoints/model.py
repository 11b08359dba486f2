"""A loaded model: config, parameters and tokenizer, and how to load one."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from m2r2_jax.checkpoints import fetch
from m2r2_jax.checkpoints.gguf import describe, load_gguf_params
from m2r2_jax.checkpoints.gguf_file import GGUFFile
from m2r2_jax.models import sharding
from m2r2_jax.models.config import Decoder, ModelConfig
from m2r2_jax.ops.execution import EXACT, PLAIN, Execution
from m2r2_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """Everything that decoding needs.

    Attributes:
      config: static description.
      params: parameter tree of `transformer.weight_specs`.
      tokenizer: text to ids and back, and the chat template.
      mesh: devices the arrays are spread over; None for a single device.
      execution: how this device multiplies.
    """

    config: ModelConfig
    params: dict
    tokenizer: Tokenizer
    mesh: Mesh | None = None
    execution: Execution = PLAIN

    @property
    def decoder(self) -> Decoder:
        """What programs are compiled for."""
        return Decoder(self.config, self.execution)

    @property
    def stream_dtype(self) -> jnp.dtype:
        """Of the residual stream and the cache."""
        return self.params["embed"].dtype

    def place(self, tree):
        """Puts arrays whose first axis is the batch on the device or over the mesh."""
        return sharding.place(self.mesh, tree)

    @property
    def unrolled(self) -> bool:
        """Whether blocks are stored per layer (see `transformer`)."""
        return isinstance(self.params["blocks"], tuple)

    @property
    def exact(self) -> Model:
        """The same model, whose f32 rows on CPU do not depend on those beside them:
        every method then gives bitwise the same logits. Slower; for equality tests.
        """
        return dataclasses.replace(self, execution=EXACT)


def load(
    path: str | Path | None = None,
    *,
    dtype: jnp.dtype | None = None,
    stream_dtype: jnp.dtype | None = None,
    mesh: Mesh | None = None,
    unrolled: bool | None = None,
    kernels: str | None = None,
) -> Model:
    """Loads a model, tensor by tensor.

    Args:
      path: a GGUF file of dense Llama architecture; `~` is the home folder. None is
        the default model, SmolLM2-135M-Instruct, fetched on first use.
      dtype: of the blocks' matrices; f32 on CPU and bf16 elsewhere by default. f16
        overflows in many models: it gives a warning.
      stream_dtype: of everything else, the residual stream and the cache included;
        that of the matrices by default. f32 beside bf16 matrices is what a CPU with
        bf16 units runs fastest in large batches.
      mesh: from `sharding.make_mesh`.
      unrolled: per-layer weights and an unrolled program, which is faster to run but
        longer to compile; by default everywhere but on TPU without kernels.
      kernels: fused Pallas kernels for passes of few rows: "tpu" or "gpu"; see
        `docs/kernels.md`. None leaves products to XLA.

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
    if unrolled is None:
        # A layer sliced off a stack is copied before a kernel reads it.
        unrolled = backend != "tpu" or kernels is not None
    if path is not None and Path(path).is_dir():
        raise ValueError(
            f"{str(path)!r} is a folder, and tokenizers of folders are not read yet; "
            "load a GGUF file of this model. Config and weights alone: "
            "m2r2_jax.checkpoints.hugging_face.load_folder_params"
        )
    file = GGUFFile(fetch.default_model_file() if path is None else path)
    name = fetch.DEFAULT_MODEL if path is None else file.path.stem
    config, vocabulary = describe(file)
    tokenizer = Tokenizer(vocabulary)
    config = dataclasses.replace(config, name=name, decodable=tokenizer.vocab_size)
    params = load_gguf_params(
        file,
        config,
        dtype,
        stream_dtype=stream_dtype or dtype,
        unrolled=unrolled,
        place=functools.partial(sharding.place, mesh),
    )
    execution = dataclasses.replace(Execution.here(), kernels=kernels)
    return Model(config, params, tokenizer, mesh, execution)


def _enable_compilation_cache() -> None:
    """Keeps compiled programs between processes, unless the user chose a place."""
    if jax.config.jax_compilation_cache_dir is None:
        folder = fetch.cache_folder() / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(folder))

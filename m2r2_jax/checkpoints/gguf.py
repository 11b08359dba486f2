"""Checkpoints to parameters: one table from file names to the tree, shapes checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from m2r2_jax.models.config import ModelConfig
from m2r2_jax.models.transformer import weight_specs


def _unpermute(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Undoes llama.cpp's rotary order: pairs (2i, 2i+1) become (i, i + H/2)."""
    heads = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def _qkv(config: ModelConfig, q, k, v) -> np.ndarray:
    K, G, H = config.num_kv_heads, config.queries_per_kv, config.head_dim
    q_KGHD = _unpermute(q, H).reshape(K, G, H, -1)
    k_K1HD = _unpermute(k, H).reshape(K, 1, H, -1)
    return np.concatenate([q_KGHD, k_K1HD, v.reshape(K, 1, H, -1)], axis=1)


def _same(config: ModelConfig, tensor) -> np.ndarray:
    del config
    return tensor


def _stack(config: ModelConfig, *tensors) -> np.ndarray:
    del config
    return np.stack(tensors)


def _place(array: np.ndarray, axes: tuple[str, ...]):
    del axes
    return jnp.asarray(array)


Transform = Callable[..., np.ndarray]

# Path in the tree -> (tensors of the file, how they become the weight). `{}` is the
# layer. GGUF architecture `llama` keeps q and k in llama.cpp's own rotary order.
GGUF_ENDS: dict[str, tuple[tuple[str, ...], Transform]] = {
    "embed": (("token_embd.weight",), _same),
    "final_norm": (("output_norm.weight",), _same),
    "head": (("output.weight",), _same),
}
GGUF_BLOCK: dict[str, tuple[tuple[str, ...], Transform]] = {
    "attention_norm": (("blk.{}.attn_norm.weight",), _same),
    "qkv": (
        ("blk.{}.attn_q.weight", "blk.{}.attn_k.weight", "blk.{}.attn_v.weight"),
        _qkv,
    ),
    "out": (("blk.{}.attn_output.weight",), _same),
    "mlp_norm": (("blk.{}.ffn_norm.weight",), _same),
    "gate_up": (("blk.{}.ffn_gate.weight", "blk.{}.ffn_up.weight"), _stack),
    "down": (("blk.{}.ffn_down.weight",), _same),
}


class GGUFFile:
    """A memory-mapped GGUF file: its metadata, and its tensors one at a time."""

    def __init__(self, path: str | Path):
        """Opens the file.

        Raises:
          FileNotFoundError: no file at `path`.
          ValueError: not a GGUF file, or a truncated one.
        """
        # Imported here: reading parameters from elsewhere must not need the package.
        import gguf

        self._dequantize = gguf.dequantize
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"no GGUF file at {str(self.path)!r}")
        try:
            reader = gguf.GGUFReader(self.path)
        except (ValueError, IndexError, KeyError) as error:
            raise ValueError(
                f"{str(self.path)!r} is not a readable GGUF file ({error}); an "
                "incomplete download?"
            ) from error
        self.metadata = {
            name: field.contents()
            for name, field in reader.fields.items()
            if not name.startswith("GGUF.")
        }
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    def names(self) -> set[str]:
        """Names of the tensors."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in row-major order, without reading it."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def read(self, name: str) -> np.ndarray:
        """Dequantizes one tensor to f32, row-major."""
        tensor = self._tensors[name]
        values = self._dequantize(tensor.data, tensor.tensor_type)
        return values.reshape(self.shape(name))


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The config of a GGUF file, after checking that every tensor is known and there.

    Raises:
      ValueError: listing all unknown and missing tensors at once.
    """
    if "token_embd.weight" not in file.names():
        raise ValueError(f"{str(file.path)!r} has no tensor 'token_embd.weight'")
    config = ModelConfig.from_gguf(
        file.metadata,
        tied_head="output.weight" not in file.names(),
        vocab_size=file.shape("token_embd.weight")[0],
    )
    expected = {name for _, names, _ in _weights(config) for name in names}
    missing, unknown = expected - file.names(), file.names() - expected
    if missing or unknown:
        raise ValueError(
            f"{str(file.path)!r} does not fit a dense Llama model: "
            f"missing tensors {_shorten(missing)}, unknown tensors {_shorten(unknown)}"
        )
    return config


def load_gguf_params(
    file: GGUFFile,
    config: ModelConfig,
    dtype,
    *,
    unrolled: bool,
    stream_dtype=None,
    place=_place,
) -> dict:
    """Reads the parameters tensor by tensor, so that the peak is one tensor above them.

    Args:
      file: the open file.
      config: its config.
      dtype: what the blocks' matrices are cast to on the way.
      stream_dtype: likewise all other weights; `dtype` by default.
      unrolled: whether blocks become a tuple of layers or a stack (see `transformer`).
      place: puts one host array on the device: `(array, spec_axes) -> jax.Array`.

    Raises:
      ValueError: a tensor's shape does not fit the config.
    """
    specs = weight_specs(config)
    ends: dict = {}
    per_layer: list[dict] = [{} for _ in range(config.num_layers)]
    for (layer, name), names, transform in _weights(config):
        spec = specs[name] if layer is None else specs["blocks"][name]
        weight = _transformed(file, config, names, transform)
        if weight is None or weight.shape != spec.shape:
            shapes = ", ".join(f"{tensor} {file.shape(tensor)}" for tensor in names)
            raise ValueError(
                f"{str(file.path)!r} has tensors of shapes {shapes}; together the "
                f"config needs {spec.shape}"
            )
        target = ends if layer is None else per_layer[layer]
        is_block_matrix = layer is not None and len(spec.shape) > 1
        cast = dtype if is_block_matrix else stream_dtype or dtype
        target[name] = place(weight.astype(cast), spec.axes)
    if unrolled:
        return {**ends, "blocks": tuple(per_layer)}
    stacked = {}
    for name in list(per_layer[0]):
        stacked[name] = jnp.stack([weights.pop(name) for weights in per_layer])
    return {**ends, "blocks": stacked}


def _transformed(
    file: GGUFFile, config: ModelConfig, names: tuple[str, ...], transform: Transform
) -> np.ndarray | None:
    """One weight from its tensors; None where their shapes do not go together."""
    tensors = [file.read(name) for name in names]
    try:
        return transform(config, *tensors)
    except ValueError:
        return None


def _weights(config: ModelConfig) -> Iterator[tuple]:
    """Rows of the table for one model: ((layer, name), file tensors, transform)."""
    for name, (tensors, transform) in GGUF_ENDS.items():
        if name != "head" or not config.tied_head:
            yield (None, name), tensors, transform
    for layer in range(config.num_layers):
        for name, (tensors, transform) in GGUF_BLOCK.items():
            yield (layer, name), tuple(t.format(layer) for t in tensors), transform


def _shorten(names: set[str]) -> str:
    """At most six names, layers folded, for an error message."""
    folded = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})
    return ", ".join(folded[:6] + ["..."] * (len(folded) > 6)) or "none"

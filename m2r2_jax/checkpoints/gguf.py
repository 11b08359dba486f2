"""Checkpoints to parameters: one table from file names to the tree, shapes checked."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from m2r2_jax.checkpoints.gguf_file import GGUFFile
from m2r2_jax.checkpoints.gguf_schema import (
    ARCHITECTURE_KEY,
    MODEL_KEYS,
    TOKENIZER_KEYS,
    raise_problems,
    read,
    refuse_unknown,
)
from m2r2_jax.models.config import ModelConfig
from m2r2_jax.models.transformer import weight_specs
from m2r2_jax.text.tokenizer import Vocabulary

_CONTROL_TYPES, _USER_DEFINED = (2, 3), 4  # values of tokenizer.ggml.token_type


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
Row = tuple[dict[str, str], Transform]

# Path in the tree -> (tensors of the file with their axes, how they become the weight).
# `{}` is the layer; axes are of `_axis_sizes`. GGUF architecture `llama` keeps q and k
# in llama.cpp's own rotary order.
GGUF_ENDS: dict[str, Row] = {
    "embed": ({"token_embd.weight": "VD"}, _same),
    "final_norm": ({"output_norm.weight": "D"}, _same),
    "head": ({"output.weight": "VD"}, _same),
}
GGUF_BLOCK: dict[str, Row] = {
    "attention_norm": ({"blk.{}.attn_norm.weight": "D"}, _same),
    "qkv": (
        {
            "blk.{}.attn_q.weight": "QD",
            "blk.{}.attn_k.weight": "KD",
            "blk.{}.attn_v.weight": "KD",
        },
        _qkv,
    ),
    "out": ({"blk.{}.attn_output.weight": "DQ"}, _same),
    "mlp_norm": ({"blk.{}.ffn_norm.weight": "D"}, _same),
    "gate_up": ({"blk.{}.ffn_gate.weight": "FD", "blk.{}.ffn_up.weight": "FD"}, _stack),
    "down": ({"blk.{}.ffn_down.weight": "DF"}, _same),
}


def describe(file: GGUFFile) -> tuple[ModelConfig, Vocabulary]:
    """The config and the vocabulary of a file, everything in it checked first.

    Raises:
      ValueError: all that is wrong with metadata and tensors, in one message.
    """
    problems = list(file.problems)
    fields = _model_fields(file, problems)
    rows = {name: fields[name] for name in ("vocab_size",) if name in fields}
    vocabulary = _tokenizer_fields(file.metadata, problems, **rows)
    raise_problems(repr(str(file.path)), problems)
    return _config(fields), _vocabulary(vocabulary)


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The config alone, of a file that need not have a tokenizer; see `describe`."""
    problems = list(file.problems)
    fields = _model_fields(file, problems)
    raise_problems(repr(str(file.path)), problems)
    return _config(fields)


def vocabulary_from_gguf(metadata: Mapping[str, object]) -> Vocabulary:
    """The vocabulary alone, of metadata that need not have a model; see `describe`."""
    problems: list[str] = []
    fields = _tokenizer_fields(metadata, problems)
    raise_problems("the GGUF metadata", problems)
    return _vocabulary(fields)


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
      config: its config, of `describe`.
      dtype: what the blocks' matrices are cast to on the way.
      stream_dtype: likewise all other weights; `dtype` by default.
      unrolled: whether blocks become a tuple of layers or a stack (see `transformer`).
      place: puts one host array on the device: `(array, spec_axes) -> jax.Array`.
    """
    specs = weight_specs(config)
    ends: dict = {}
    per_layer: list[dict] = [{} for _ in range(config.num_layers)]
    rows = _weights(config.num_layers, config.tied_head)
    for (layer, name), names, transform in rows:
        spec = specs[name] if layer is None else specs["blocks"][name]
        weight = transform(config, *map(file.read, names))
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


def _model_fields(file: GGUFFile, problems: list[str]) -> dict:
    """Sound fields of `MODEL_KEYS`; problems of metadata and of tensors are added."""
    metadata = file.metadata
    architecture = read(metadata, [ARCHITECTURE_KEY], problems).get("architecture")
    if architecture is None:
        return {}
    known = {
        "tied_head": "output.weight" not in file.names(),
        "num_tensors": len(file.names()),
    }
    if "token_embd.weight" in file.names():
        known["vocab_size"] = file.shape("token_embd.weight")[0]
    fields = read(metadata, MODEL_KEYS, problems, architecture=architecture, **known)
    refuse_unknown(metadata, architecture, problems)
    if "num_layers" in fields:
        _check_tensors(file, fields, problems)
    return fields


def _check_tensors(file: GGUFFile, fields: dict, problems: list[str]) -> None:
    """Adds what is missing, unknown or of the wrong shape; reads no tensor."""
    rows = _weights(fields["num_layers"], fields["tied_head"])
    expected = {name: axes for _, names, _ in rows for name, axes in names.items()}
    missing, unknown = expected.keys() - file.names(), file.names() - expected.keys()
    if missing or unknown:
        problems.append(
            f"its tensors do not fit a dense Llama model: missing tensors "
            f"{_shorten(missing)}, unknown tensors {_shorten(unknown)}"
        )
    sizes = _axis_sizes(fields)
    if not sizes:
        return
    for name, axes in expected.items():
        needed = tuple(sizes[axis] for axis in axes)
        if name not in missing and (found := file.shape(name)) != needed:
            problems.append(f"tensor {name!r} is of shape {found}; {needed} is needed")


def _axis_sizes(fields: dict) -> dict[str, int] | None:
    """Sizes of the file's axes; None where a field they follow from has a problem."""
    try:
        H = fields["head_dim"]
        return {
            "V": fields["vocab_size"],
            "D": fields["width"],
            "F": fields["hidden_width"],
            "Q": fields["num_heads"] * H,
            "K": fields["num_kv_heads"] * H,
        }
    except KeyError:
        return None


def _config(fields: dict) -> ModelConfig:
    """The config of sound fields. What other families have is off by default; the rows
    of a feature of that kind only refuse it, and their value for off is the file's.
    """
    every = dataclasses.fields(ModelConfig)
    wanted = [field.name for field in every if field.default is dataclasses.MISSING]
    return ModelConfig(**{name: fields[name] for name in wanted})


def _tokenizer_fields(metadata: Mapping, problems: list[str], **known) -> dict:
    """Sound fields of `TOKENIZER_KEYS`, and the templates that have names."""
    fields = read(metadata, TOKENIZER_KEYS, problems, **known)
    prefix = "tokenizer.chat_template."
    others = sorted(k.removeprefix(prefix) for k in metadata if k.startswith(prefix))
    return fields | {"other_templates": [n for n in others if n != "default"]}


def _vocabulary(fields: dict) -> Vocabulary:
    types = fields["types"]
    typed = () if types is None else types
    ends = {fields[f"{end}_id"] for end in ("eos", "eot", "eom")} - {None}
    return Vocabulary(
        tokens=fields["tokens"],
        merges=[tuple(merge.split(" ", 1)) for merge in fields["merges"]],
        split=fields["pre"],
        control_ids=frozenset(np.flatnonzero(np.isin(typed, _CONTROL_TYPES)).tolist()),
        unit_ids=frozenset(np.flatnonzero(np.equal(typed, _USER_DEFINED)).tolist()),
        bos_id=fields["bos_id"],
        eos_id=fields["eos_id"],
        end_ids=frozenset(ends),
        add_bos=fields["add_bos"],
        chat_template=fields["chat_template"],
        other_templates=tuple(fields["other_templates"]),
    )


def _weights(num_layers: int, tied_head: bool) -> Iterator[tuple]:
    """Rows of the table for one model: ((layer, name), tensors' axes, transform)."""
    for name, (tensors, transform) in GGUF_ENDS.items():
        if name != "head" or not tied_head:
            yield (None, name), tensors, transform
    for layer in range(num_layers):
        for name, (tensors, transform) in GGUF_BLOCK.items():
            named = {tensor.format(layer): axes for tensor, axes in tensors.items()}
            yield (layer, name), named, transform


def _shorten(names: set[str]) -> str:
    """At most six names, layers folded, for an error message."""
    folded = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})
    return ", ".join(folded[:6] + ["..."] * (len(folded) > 6)) or "none"

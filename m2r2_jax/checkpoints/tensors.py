"""Tables from tensors of a checkpoint to weights of the tree, and their use.

A table is checked against names and shapes before anything is read, so that a folder's
problems are reported together. Then tensors are read one by one, cast on the way, and
put on the device, so that the peak is one weight above the parameters.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import jax.numpy as jnp
import numpy as np

from m2r2_jax.models.config import ModelConfig
from m2r2_jax.models.transformer import WeightSpec, weight_specs

Shape = tuple[int, ...]


class Tensors(Protocol):
    """Named tensors that are read one at a time."""

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> Shape: ...

    def read(self, name: str) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Join:
    """How the tensors of a row become one weight.

    Attributes:
      shapes: `(config, shape of the weight) -> shapes of the tensors`.
      join: `(config, shape of the weight, tensors) -> weight`.
    """

    shapes: Callable[[ModelConfig, Shape], list[Shape]]
    join: Callable[[ModelConfig, Shape, list[np.ndarray]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Row:
    """Where a weight comes from.

    Attributes:
      names: of its tensors; `{layer}` and `{expert}` are filled in, for experts one
        after the other.
      join: what is made of them.
    """

    names: tuple[str, ...]
    join: Join


# Weight -> the ways in which checkpoints hold it, of which the first that is there
# counts.
Table = Mapping[str, tuple[Row, ...]]


def _as_query_rows(config: ModelConfig, shape: Shape, rows: np.ndarray):
    """Rows of whole heads: `[heads * H, ...] -> [K, heads / K, H, ...]`.

    Where a head is turned in part, the turned dimensions move to the front of both its
    halves: pairs are (i, i + H/2) in every model then.
    """
    K, _, H, *inputs = shape
    heads = rows.reshape(K, -1, H, *inputs)
    if config.rotary_dim is None:
        return heads
    half, rest = config.rotary_dim // 2, (H - config.rotary_dim) // 2
    order = np.r_[
        0:half,
        2 * half : 2 * half + rest,
        half : 2 * half,
        2 * half + rest : H,
    ]
    return heads[:, :, order]


def _qkv_shapes(config: ModelConfig, shape: Shape) -> list[Shape]:
    K, width, H, *inputs = shape
    return [(K * (width - 2) * H, *inputs)] + [(K * H, *inputs)] * 2


def _join_qkv(config: ModelConfig, shape: Shape, tensors: list[np.ndarray]):
    query, key, value = tensors
    turned = [_as_query_rows(config, shape, rows) for rows in (query, key)]
    K, _, H, *inputs = shape
    return np.concatenate([*turned, value.reshape(K, 1, H, *inputs)], axis=1)


def _split_qkv(config: ModelConfig, shape: Shape, tensors: list[np.ndarray]):
    sizes = [rows[0] for rows in _qkv_shapes(config, shape)]
    return _join_qkv(config, shape, np.split(tensors[0], np.cumsum(sizes)[:2]))


def _fused_qkv_shapes(config: ModelConfig, shape: Shape) -> list[Shape]:
    K, width, H, *inputs = shape
    return [(K * width * H, *inputs)]


def _flat_shapes(config: ModelConfig, shape: Shape) -> list[Shape]:
    return [(int(np.prod(shape)),)]


def _same_shapes(config: ModelConfig, shape: Shape) -> list[Shape]:
    return [shape]


def _reshape(config: ModelConfig, shape: Shape, tensors: list[np.ndarray]):
    return tensors[0].reshape(shape)


def _plus_one(config: ModelConfig, shape: Shape, tensors: list[np.ndarray]):
    return tensors[0].astype(np.float32).reshape(shape) + 1


WHOLE = Join(_same_shapes, _reshape)
FLAT = Join(_flat_shapes, _reshape)
# Norms that scale by 1 + w: the sum is taken in f32, once, here.
PLUS_ONE = Join(_flat_shapes, _plus_one)
QKV = Join(_qkv_shapes, _join_qkv)
FUSED_QKV = Join(_fused_qkv_shapes, _split_qkv)
# Gate and up.
HALVES = Join(
    lambda config, shape: [shape[1:]] * 2,
    lambda config, shape, tensors: np.stack(tensors),
)
FUSED_HALVES = Join(
    lambda config, shape: [(2 * shape[1], *shape[2:])],
    _reshape,
)
EXPERT_HALVES = Join(
    lambda config, shape: [shape[2:]] * 2 * shape[0],
    lambda config, shape, tensors: np.stack(tensors).reshape(shape),
)
FUSED_EXPERT_HALVES = Join(
    lambda config, shape: [(shape[0], 2 * shape[2], shape[3])],
    _reshape,
)
EXPERT_DOWN = Join(
    lambda config, shape: [(shape[0], shape[2])] * shape[1],
    lambda config, shape, tensors: np.stack(tensors, axis=1),
)
FUSED_EXPERT_DOWN = Join(
    lambda config, shape: [(shape[1], shape[0], shape[2])],
    lambda config, shape, tensors: tensors[0].swapaxes(0, 1),
)


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight that a model needs, and where it comes from.

    Attributes:
      layer: None for those outside the blocks.
      name: in the tree.
      spec: shape and axes.
      names: of its tensors.
      join: what is made of them.
    """

    layer: int | None
    name: str
    spec: WeightSpec
    names: tuple[str, ...]
    join: Join


def weights_of(config: ModelConfig, table: Table, there: set[str]) -> list[Weight]:
    """Every weight of a model, in the order of reading."""
    specs = dict(weight_specs(config))
    blocks, found = specs.pop("blocks"), []
    for layer in range(config.num_layers):
        found += [(layer, name, spec) for name, spec in blocks.items()]
    found += [(None, name, spec) for name, spec in specs.items()]
    return [
        Weight(*place, *_chosen(config, rows_of(table, place[1]), place[0], there))
        for place in found
    ]


def rows_of(table: Table, name: str) -> tuple[Row, ...]:
    """A weight's rows. A bias stands beside the weight whose product it is added to."""
    if name in table:
        return table[name]
    return tuple(
        Row(tuple(n.removesuffix("weight") + "bias" for n in row.names), row.join)
        for row in table[name.removesuffix("_bias")]
    )


def _chosen(config, rows: tuple[Row, ...], layer, there: set[str]):
    """Names and join of the first row that is there, or that should be."""
    filled = [(_filled(config, row, layer), row.join) for row in rows]
    whole = [names for names, _ in filled if there.issuperset(names)]
    return next((row for row in filled if row[0] in whole), filled[0])


def _filled(config: ModelConfig, row: Row, layer: int | None) -> tuple[str, ...]:
    if not any("{expert}" in name for name in row.names):
        return tuple(name.format(layer=layer) for name in row.names)
    return tuple(
        name.format(layer=layer, expert=expert)
        for expert in range(config.experts.count)
        for name in row.names
    )


def check(
    where: str,
    config: ModelConfig,
    weights: list[Weight],
    tensors: Tensors,
    there: set[str],
) -> None:
    """Raises ValueError with all tensors that are missing, unknown or of another shape.

    Args:
      where: the checkpoint, for the message.
      config: its config.
      weights: from `weights_of`.
      tensors: of the checkpoint.
      there: names of those that count.
    """
    expected, wrong = set(), set()
    for weight in weights:
        expected.update(weight.names)
        shapes = weight.join.shapes(config, weight.spec.shape)
        for name, shape in zip(weight.names, shapes, strict=True):
            if name in there and tensors.shape(name) != shape:
                wrong.add(f"{name} {tensors.shape(name)} instead of {shape}")
    problems = {
        "missing": expected - there,
        "unknown": there - expected,
        "of another shape": wrong,
    }
    if any(problems.values()):
        listed = "; ".join(f"{what}: {shorten(n)}" for what, n in problems.items() if n)
        raise ValueError(f"{where} does not fit its config ({config.name}): {listed}")


def read_params(
    config: ModelConfig,
    weights: list[Weight],
    tensors: Tensors,
    dtype,
    *,
    unrolled: bool,
    stream_dtype,
    place: Callable,
) -> dict:
    """Reads the parameters tensor by tensor.

    Args:
      config: of the model.
      weights: from `weights_of`, checked.
      tensors: of the checkpoint.
      dtype: what the blocks' matrices are cast to on the way.
      unrolled: whether blocks become a tuple of layers or a stack (see `transformer`).
      stream_dtype: what all other weights are cast to, but for norms. Those stay in
        f32, in which they are applied: 1 + w has more digits than bf16 holds.
      place: puts one host array on the device: `(array, axes) -> jax.Array`.
    """
    ends: dict = {}
    per_layer: list[dict] = [{} for _ in range(config.num_layers)]
    for weight, array in _joined(config, weights, tensors):
        target = ends if weight.layer is None else per_layer[weight.layer]
        is_block_matrix = weight.layer is not None and not weight.name.endswith("_bias")
        cast = dtype if is_block_matrix else stream_dtype
        if weight.name.endswith("_norm"):
            cast = jnp.float32
        target[weight.name] = place(array.astype(cast), weight.spec.axes)
    if unrolled:
        return {**ends, "blocks": tuple(per_layer)}
    stacked = {}
    for name in list(per_layer[0]):
        stacked[name] = jnp.stack([layer.pop(name) for layer in per_layer])
    return {**ends, "blocks": stacked}


def _joined(
    config: ModelConfig, weights: list[Weight], tensors: Tensors
) -> Iterator[tuple[Weight, np.ndarray]]:
    for weight in weights:
        read = [tensors.read(name) for name in weight.names]
        yield weight, weight.join.join(config, weight.spec.shape, read)


def shorten(names: set[str]) -> str:
    """At most six names, layers and experts folded, for an error message."""
    folded = sorted({re.sub(r"\.\d+(?=\.)", ".*", name) for name in names})
    return ", ".join(folded[:6] + ["..."] * (len(folded) > 6))

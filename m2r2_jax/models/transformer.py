"""The decoder: one table of weights, one block, one way through the layers.

The parameter tree has one form with two storages of its blocks: a dict whose leaves
are stacked over layers (scanned: short programs, for training and TPU), or a tuple
of per-layer dicts (unrolled: no slice of a stack is copied, for decoding on CPU).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax import lax

from m2r2_jax.models import layers
from m2r2_jax.models.cache import KVCache, cache_layout
from m2r2_jax.models.config import Decoder, ModelConfig
from m2r2_jax.ops.products import linear


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """Shape, logical axis names and initializer of one weight."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Callable = dataclasses.field(
        default=nn.initializers.normal(0.02), compare=False
    )


def weight_specs(config: ModelConfig) -> dict:
    """The one description of the parameter tree; blocks without the layer axis.

    Loading, initialisation and sharding all read it. `qkv` holds, for each key/value
    head, its G query heads, then the key, then the value: one product, and a split
    over heads keeps a group together. `gate_up` holds both halves of the MLP.
    """
    V, D, F = config.vocab_size, config.width, config.hidden_width
    K, G, H = config.num_kv_heads, config.queries_per_kv, config.head_dim
    ones = nn.initializers.ones
    specs = {
        "embed": WeightSpec((V, D), ("vocab", "width")),
        "blocks": {
            "attention_norm": WeightSpec((D,), ("width",), ones),
            "qkv": WeightSpec((K, G + 2, H, D), ("kv_heads", "group", "head", "width")),
            "out": WeightSpec((D, K * G * H), ("width", "heads")),
            "mlp_norm": WeightSpec((D,), ("width",), ones),
            "gate_up": WeightSpec((2, F, D), ("halves", "hidden", "width")),
            "down": WeightSpec((D, F), ("width", "hidden")),
        },
        "final_norm": WeightSpec((D,), ("width",), ones),
    }
    if not config.tied_head:
        specs["head"] = WeightSpec((V, D), ("vocab", "width"))
    return specs


class Blocks(nn.Module):
    """Holds the weights of all blocks, stacked over layers; the maths is elsewhere."""

    config: ModelConfig

    @nn.compact
    def __call__(self) -> dict:
        specs = weight_specs(self.config)["blocks"]
        num_layers = self.config.num_layers
        return {
            name: self.param(name, spec.init, (num_layers, *spec.shape))
            for name, spec in specs.items()
        }


class Transformer(nn.Module):
    """Flax face of the decoder: `init` makes the stacked tree, `apply` runs it."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Next-token logits `[B, T, V]` (f32) of whole sequences, without a cache."""
        params = {
            name: self.param(name, spec.init, spec.shape)
            for name, spec in weight_specs(self.config).items()
            if name != "blocks"
        }
        params["blocks"] = Blocks(self.config, name="blocks")()
        return forward(Decoder(self.config), params, tokens_BT)


def init_params(config: ModelConfig, key: jax.Array) -> dict:
    """Random stacked parameters in f32: for tests, and for training from scratch."""
    return Transformer(config).init(key, jnp.zeros((1, 1), jnp.int32))["params"]


def unroll(stacked: dict) -> tuple[dict, ...]:
    """Splits weights stacked over layers into one dict per layer (copies each leaf)."""
    num_layers = len(jax.tree.leaves(stacked)[0])
    return tuple(layer_weights(stacked, layer) for layer in range(num_layers))


def layer_weights(layers_of_weights: dict | tuple[dict, ...], layer) -> dict:
    """One layer's weights from either storage; `layer` may be traced for a stack."""
    if isinstance(layers_of_weights, tuple):
        return layers_of_weights[layer]
    return jax.tree.map(lambda leaf: leaf[layer], layers_of_weights)


def matrix_dtype(params: dict):
    """The dtype of the blocks' matrices, which may be narrower than the stream's."""
    return layer_weights(params["blocks"], 0)["out"].dtype


def like_matrices(params: dict, tree):
    """The tree in the dtype of the model's matrices, in which products run."""
    dtype = matrix_dtype(params)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


@struct.dataclass
class Rows:
    """Where the rows of one pass stand and what they see.

    Attributes:
      turns: cosines and sines of the rotary angles, `[B, R, H/2]` each.
      mask: `bool[B, R, S]`, the cache slots (or, uncached, the rows) a row may read.
      slow: how many leading rows are slow ones, whose keys and values are kept.
    """

    turns: tuple[jax.Array, jax.Array]
    mask: jax.Array
    slow: int = struct.field(pytree_node=False)


def cached_rows(
    config: ModelConfig, cache: KVCache, offset_T: jax.Array, mask_TT: jax.Array
) -> Rows:
    """Rows that will be appended to a cache.

    Args:
      config: the model.
      cache: T rows go into its slots from `length` on.
      offset_T: position of each row relative to `length`.
      mask_TT: which of the T rows each row may read; all committed slots are read.
    """
    positions_BT = cache.length[:, None] + offset_T
    relative_BS = jnp.arange(cache.capacity) - cache.length[:, None]
    is_new_BTS = (relative_BS[:, None, :, None] == jnp.arange(len(offset_T))).astype(
        jnp.bool_
    )
    sees_new_BTS = jnp.any(is_new_BTS & mask_TT[None, :, None, :], axis=-1)
    mask_BTS = (relative_BS < 0)[:, None] | sees_new_BTS
    return Rows(rotary_turns(config, positions_BT), mask_BTS, len(offset_T))


def rotary_turns(config: ModelConfig, positions: jax.Array):
    """What queries and keys of these positions are turned by; see `layers`."""
    return layers.rotary_turns(
        positions, config.head_dim, config.rope_theta, config.context_length
    )


def with_fast_rows(rows: Rows) -> Rows:
    """The same rows again as fast ones, which see exactly what their slow twins see."""
    return Rows(
        tuple(jnp.concatenate([turn] * 2, axis=1) for turn in rows.turns),
        jnp.concatenate([rows.mask] * 2, axis=1),
        rows.slow,
    )


def block(
    decoder: Decoder,
    weights: dict,
    x_BRD: jax.Array,
    rows: Rows,
    cache: KVCache | None,
    layer,
    project: Callable | None = None,
) -> tuple[jax.Array, KVCache | None]:
    """One pre-norm decoder block.

    Every row goes through each weight in the same product, slow and fast alike, so
    a weight is read once. Fast rows have queries only: they read what slow rows wrote.

    Args:
      decoder: the model, and how it runs.
      weights: one layer's weights, as in `weight_specs`.
      x_BRD: residual stream of the rows.
      rows: positions and masks.
      cache: slow rows are appended to it; None attends among the rows themselves.
      layer: index of the layer in the cache.
      project: `(layer, name, x, weight) -> product`, where there are fast rows
        (`multirate.accelerated`); else all rows are multiplied by the weight alone.

    Returns:
      The residual stream after the block, and the cache.
    """
    G, epsilon = decoder.config.queries_per_kv, decoder.config.norm_epsilon

    def multiply(name: str, x: jax.Array) -> jax.Array:
        if project is None:
            return linear(x, weights[name], decoder.execution)
        return project(layer, name, x, weights[name])

    normed = layers.rms_norm(x_BRD, weights["attention_norm"], epsilon)
    qkv_BRKgH = multiply("qkv", normed)
    q_BRKGH = layers.rotate(qkv_BRKgH[..., :G, :], rows.turns)
    slow_BTKgH = qkv_BRKgH[:, : rows.slow]
    slow_turns = tuple(turn[:, : rows.slow] for turn in rows.turns)
    k_BTKH = layers.rotate(slow_BTKgH[..., G : G + 1, :], slow_turns)
    k_BTKH, v_BTKH = k_BTKH[..., 0, :], slow_BTKgH[..., G + 1, :]
    if cache is None:
        keys, values = cache_layout(k_BTKH), cache_layout(v_BTKH)
    else:
        cache = cache.append(layer, k_BTKH, v_BTKH)
        keys, values = cache.read(layer)
    mixed = layers.attention(q_BRKGH, keys, values, rows.mask, decoder.execution)
    x_BRD = x_BRD + multiply("out", mixed)
    normed = layers.rms_norm(x_BRD, weights["mlp_norm"], epsilon)
    gate_up = multiply("gate_up", normed)
    gated = layers.gated_product(gate_up)
    return x_BRD + multiply("down", gated), cache


def run_layers(
    decoder: Decoder,
    blocks,
    x_BRD: jax.Array,
    rows: Rows,
    cache: KVCache | None,
    lo: int,
    hi: int,
    project: Callable | None = None,
) -> tuple[jax.Array, KVCache | None]:
    """Runs blocks lo..hi-1, unrolled or as a loop, whichever way they are stored."""
    if isinstance(blocks, tuple):
        for layer in range(lo, hi):
            x_BRD, cache = block(
                decoder, blocks[layer], x_BRD, rows, cache, layer, project
            )
        return x_BRD, cache

    def step(carry, layer):
        # Indexing inside the loop reads one layer; slicing lo:hi would copy them all.
        weights = layer_weights(blocks, layer)
        x_BRD, cache = carry
        return block(decoder, weights, x_BRD, rows, cache, layer, project), None

    return lax.scan(step, (x_BRD, cache), jnp.arange(lo, hi))[0]


def embed(params: dict, tokens: jax.Array) -> jax.Array:
    """Residual stream at depth 0: `int[...] -> [..., D]`."""
    return params["embed"][tokens]


def final_norm(config: ModelConfig, params: dict, x: jax.Array) -> jax.Array:
    """The normalised final state, which `unembed` and the carry both read."""
    return layers.rms_norm(x, params["final_norm"], config.norm_epsilon)


def unembed(decoder: Decoder, params: dict, normed: jax.Array) -> jax.Array:
    """Logits over the full vocabulary, f32: `[..., D] -> [..., V]`.

    They never pass through bf16, which would round those of 16 and more to eighths.
    """
    head = params.get("head", params["embed"])
    return linear(normed, head, decoder.execution, jnp.float32)


def forward(decoder: Decoder, params: dict, tokens_BT: jax.Array) -> jax.Array:
    """Logits `[B, T, V]` of whole sequences, causal, without a cache."""
    config, T = decoder.config, tokens_BT.shape[1]
    turns = rotary_turns(config, jnp.arange(T)[None])
    rows = Rows(turns, jnp.tril(jnp.ones((1, T, T), jnp.bool_)), T)
    x_BTD, _ = run_layers(
        decoder,
        params["blocks"],
        embed(params, tokens_BT),
        rows,
        None,
        0,
        config.num_layers,
    )
    return unembed(decoder, params, final_norm(config, params, x_BTD))

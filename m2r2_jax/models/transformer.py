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
from m2r2_jax.models.places import Places, places_of
from m2r2_jax.models.rotary import rotary_turns, rotate
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

    Loading, initialisation and sharding all read it.
    """
    V, D = config.vocab_size, config.width
    specs = {
        "embed": WeightSpec((V, D), ("vocab", "width")),
        "blocks": {
            **_norm_specs(config),
            **_attention_specs(config),
            **(_mlp_specs(config) if config.experts is None else _expert_specs(config)),
        },
        "final_norm": _norm_of_width(config),
    }
    specs["blocks"].update(_bias_specs(config, specs["blocks"]))
    if not config.tied_head:
        specs["head"] = WeightSpec((V, D), ("vocab", "width"))
    return specs


def _norm_of_width(config: ModelConfig) -> WeightSpec:
    return WeightSpec((config.width,), ("width",), nn.initializers.ones)


def _norm_specs(config: ModelConfig) -> dict[str, WeightSpec]:
    """Norms before and after attention and MLP."""
    ends = {"before": ("",), "after": ("_out",), "both": ("", "_out")}[config.norms]
    parts = ("attention", "mlp")
    return {
        f"{part}{end}_norm": _norm_of_width(config) for part in parts for end in ends
    }


def _attention_specs(config: ModelConfig) -> dict[str, WeightSpec]:
    """`qkv` holds, for each key/value head, its G query heads, then the key, then the
    value: one product, and a split over heads keeps a group together.
    """
    D, H = config.width, config.head_dim
    K, G = config.num_kv_heads, config.queries_per_kv
    heads = ("kv_heads", "group", "head")
    specs = {
        "qkv": WeightSpec((K, G + 2, H, D), (*heads, "width")),
        "out": WeightSpec((D, K * G * H), ("width", "heads")),
    }
    ones = nn.initializers.ones
    if config.qk_norm == "head":
        specs["q_norm"] = specs["k_norm"] = WeightSpec((H,), ("head",), ones)
    if config.qk_norm == "projection":
        specs["q_norm"] = WeightSpec((K, G, H), heads, ones)
        specs["k_norm"] = WeightSpec((K, 1, H), heads, ones)
    return specs


def _mlp_specs(config: ModelConfig) -> dict[str, WeightSpec]:
    """`gate_up` holds both halves of the MLP."""
    D, F = config.width, config.hidden_width
    return {
        "gate_up": WeightSpec((2, F, D), ("halves", "hidden", "width")),
        "down": WeightSpec((D, F), ("width", "hidden")),
    }


def _expert_specs(config: ModelConfig) -> dict[str, WeightSpec]:
    """A mixture's router and experts; `experts_down` sums over experts and widths."""
    D, F = config.width, config.hidden_width
    E, shared = config.experts.count, config.experts.shared_width
    halves = ("halves", "hidden", "width")
    specs = {
        "router": WeightSpec((E, D), ("experts", "width")),
        "experts_gate_up": WeightSpec((E, 2, F, D), ("experts", *halves)),
        "experts_down": WeightSpec((D, E, F), ("width", "experts", "hidden")),
    }
    if shared:
        specs["shared_gate_up"] = WeightSpec((2, shared, D), halves)
        specs["shared_down"] = WeightSpec((D, shared), ("width", "hidden"))
        specs["shared_gate"] = WeightSpec((1, D), ("gate", "width"))
    return specs


def _bias_specs(config: ModelConfig, specs: dict) -> dict[str, WeightSpec]:
    """What the products that have a bias add: a weight's shape without its inputs."""
    zeros = nn.initializers.zeros
    return {
        f"{name}_bias": WeightSpec(specs[name].shape[:-1], specs[name].axes[:-1], zeros)
        for name in config.biases
    }


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
class View:
    """Where the rows of one pass stand, and what they see in layers of one kind.

    Attributes:
      turns: cosines and sines of the rotary angles, `[B, R, H/2]` each.
      mask: `bool[B, R, S]`, the cache slots (or, uncached, the rows) a row may read.
    """

    turns: tuple[jax.Array, jax.Array]
    mask: jax.Array


@struct.dataclass
class Rows:
    """The rows of one pass.

    Attributes:
      views: one for each of the config's `layer_kinds`.
      slow: how many leading rows are slow ones, whose keys and values are kept.
    """

    views: tuple[View, ...]
    slow: int = struct.field(pytree_node=False)

    def view(self, config: ModelConfig, layer) -> View:
        """What is seen in a layer, whose index may be traced."""
        if len(self.views) == 1:
            return self.views[0]
        if isinstance(layer, int):
            return self.views[config.kind_of_layer[layer]]
        kind = jnp.asarray(config.kind_of_layer)[layer]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves)[kind], *self.views)


def rows_at(
    config: ModelConfig,
    position_BR: jax.Array,
    slot_position_BS: jax.Array,
    sees_BRS: jax.Array,
) -> Rows:
    """Slow rows at these positions.

    Args:
      config: the model.
      position_BR: of the rows.
      slot_position_BS: of what the slots hold.
      sees_BRS: which slots each row may read where no window is in the way.
    """
    views = []
    for kind in config.layer_kinds:
        mask_BRS = sees_BRS
        if kind.window:
            distance_BRS = position_BR[:, :, None] - slot_position_BS[:, None]
            mask_BRS = sees_BRS & (distance_BRS < kind.window)
        views.append(View(rotary_turns(position_BR, kind.rope), mask_BRS))
    return Rows(tuple(views), position_BR.shape[1])


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
    slot_S = jnp.arange(cache.capacity)
    relative_BS = slot_S - cache.length[:, None]
    is_new_BTS = (relative_BS[:, None, :, None] == jnp.arange(len(offset_T))).astype(
        jnp.bool_
    )
    sees_new_BTS = jnp.any(is_new_BTS & mask_TT[None, :, None, :], axis=-1)
    mask_BTS = (relative_BS < 0)[:, None] | sees_new_BTS
    # A committed slot holds its own position, a new row's that of the row.
    row_BS = jnp.clip(relative_BS, 0, len(offset_T) - 1)
    new_BS = cache.length[:, None] + jnp.asarray(offset_T)[row_BS]
    slot_position_BS = jnp.where(relative_BS < 0, slot_S, new_BS)
    return rows_at(config, positions_BT, slot_position_BS, mask_BTS)


def with_fast_rows(rows: Rows) -> Rows:
    """The same rows again as fast ones, which see exactly what their slow twins see."""
    twice = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * 2, axis=1), rows.views)
    return rows.replace(views=twice)


def block(
    decoder: Decoder,
    weights: dict,
    x_BRD: jax.Array,
    rows: Rows,
    cache: KVCache | None,
    layer,
    pairs: dict | None = None,
) -> tuple[jax.Array, KVCache | None]:
    """One decoder block: what attention, then the MLP, add to the residual stream.

    Fast rows have queries only: they read what slow rows wrote.

    Args:
      decoder: the model, and how it runs.
      weights: one layer's weights, as in `weight_specs`.
      x_BRD: residual stream of the rows.
      rows: positions and masks.
      cache: slow rows are appended to it; None attends among the rows themselves.
      layer: index of the layer in the cache.
      pairs: the layer's accelerators, where rows behind the slow ones are fast.

    Returns:
      The residual stream after the block, and the cache.
    """
    places = places_of(decoder, weights, pairs, rows.slow, x_BRD)
    x_BRD, cache = _attend(places, x_BRD, rows, cache, layer)
    mlp = _mlp if decoder.config.experts is None else _mixture
    return mlp(places, x_BRD), cache


def _attend(
    places: Places,
    x_BRD: jax.Array,
    rows: Rows,
    cache: KVCache | None,
    layer,
) -> tuple[jax.Array, KVCache | None]:
    """The attention part of a block, and the cache with the slow rows in it."""
    config = places.decoder.config
    G, view = config.queries_per_kv, rows.view(config, layer)
    qkv_BRKgH = places.into("qkv", x_BRD)
    q_BRKGH = rotate(places.norm("q_norm", qkv_BRKgH[..., :G, :]), view.turns)
    slow_BTKgH = qkv_BRKgH[:, : rows.slow]
    slow_turns = tuple(turn[:, : rows.slow] for turn in view.turns)
    k_BTK1H = places.norm("k_norm", slow_BTKgH[..., G : G + 1, :])
    k_BTKH = rotate(k_BTK1H, slow_turns)[..., 0, :]
    v_BTKH = slow_BTKgH[..., G + 1, :]
    if cache is None:
        stored, stop_B = (cache_layout(k_BTKH), cache_layout(v_BTKH)), None
    else:
        cache = cache.append(layer, k_BTKH, v_BTKH)
        stored, stop_B = cache.read(layer), cache.length + rows.slow
    mixed = places.attend(q_BRKGH, *stored, view.mask, stop_B)
    return places.onto("out", mixed, x_BRD), cache


def _mlp(places: Places, x_BRD: jax.Array) -> jax.Array:
    """The dense MLP part of a block."""
    return places.onto("down", places.gated(x_BRD), x_BRD)


def _mixture(places: Places, x_BRD: jax.Array) -> jax.Array:
    """A mixture of experts as MLP part: every expert runs, the chosen ones count."""
    config, execution = places.decoder.config, places.decoder.execution
    experts, weights = config.experts, places.weights
    normed_BRD = places.norm("mlp_norm", x_BRD)
    # In f32 whatever the weights' dtype: near-ties decide which experts run.
    router = weights["router"].astype(jnp.float32)
    logits_BRE = linear(normed_BRD.astype(jnp.float32), router, execution)
    chosen_BRE = layers.chosen_experts(
        logits_BRE, experts.per_token, experts.renormalise
    )
    gated_BREF = layers.gated_product(
        places.multiply("experts_gate_up", normed_BRD), config.activation
    )
    weight_BRE1 = chosen_BRE[..., None].astype(gated_BREF.dtype)
    # What is not chosen may have overflowed, and infinity times zero is no number.
    gated_BREF = jnp.where(weight_BRE1 > 0, gated_BREF * weight_BRE1, 0)
    flat = weights["experts_down"].reshape(config.width, -1)
    gated = gated_BREF.reshape(*normed_BRD.shape[:2], -1)
    mixed_BRD = linear(gated, flat, execution)
    if experts.shared_width:
        shared = layers.gated_product(
            places.multiply("shared_gate_up", normed_BRD), config.activation
        )
        gate = jax.nn.sigmoid(places.multiply("shared_gate", normed_BRD))
        mixed_BRD += gate * places.multiply("shared_down", shared)
    return places.add("mlp", x_BRD, mixed_BRD)


def run_layers(
    decoder: Decoder,
    blocks,
    x_BRD: jax.Array,
    rows: Rows,
    cache: KVCache | None,
    lo: int,
    hi: int,
    accelerators: dict | tuple[dict, ...] | None = None,
) -> tuple[jax.Array, KVCache | None]:
    """Runs blocks lo..hi-1, unrolled or as a loop, whichever way they are stored.

    With `accelerators`, pairs by layer, rows behind the slow ones are fast rows.
    """

    def pairs_of(layer):
        return None if accelerators is None else layer_weights(accelerators, layer)

    if isinstance(blocks, tuple):
        for layer in range(lo, hi):
            x_BRD, cache = block(
                decoder, blocks[layer], x_BRD, rows, cache, layer, pairs_of(layer)
            )
        return x_BRD, cache

    def step(carry, layer):
        # Indexing inside the loop reads one layer; slicing lo:hi would copy them all.
        weights = layer_weights(blocks, layer)
        x_BRD, cache = carry
        pairs = pairs_of(layer)
        return block(decoder, weights, x_BRD, rows, cache, layer, pairs), None

    return lax.scan(step, (x_BRD, cache), jnp.arange(lo, hi, dtype=jnp.int32))[0]


def embed(config: ModelConfig, params: dict, tokens: jax.Array) -> jax.Array:
    """Residual stream at depth 0: `int[...] -> [..., D]`."""
    embedded = params["embed"][tokens]
    if config.embed_multiplier != 1:
        embedded *= jnp.asarray(config.embed_multiplier, embedded.dtype)
    return embedded


def final_norm(config: ModelConfig, params: dict, x: jax.Array) -> jax.Array:
    """The normalised final state, which `unembed` and the carry both read."""
    return layers.rms_norm(x, params["final_norm"], config.norm_epsilon)


def unembed(decoder: Decoder, params: dict, normed: jax.Array) -> jax.Array:
    """Logits over the full vocabulary, f32: `[..., D] -> [..., V]`.

    They never pass through bf16, which would round those of 16 and more to eighths.
    Ids without a text have -inf: nothing chooses them.
    """
    config = decoder.config
    head = params.get("head", params["embed"])
    product = linear(normed, head, decoder.execution, jnp.float32)
    logits = finished_logits(product, config.logit_multiplier, config.logit_cap)
    if config.decodable is None:
        return logits
    return jnp.where(jnp.arange(config.vocab_size) < config.decodable, logits, -jnp.inf)


def finished_logits(
    product: jax.Array, multiplier: float, cap: float | None
) -> jax.Array:
    """Logits from a head's product, over the whole vocabulary or a part of it."""
    if multiplier != 1:
        product = product * multiplier
    return layers.soft_cap(product, cap)


def forward(decoder: Decoder, params: dict, tokens_BT: jax.Array) -> jax.Array:
    """Logits `[B, T, V]` of whole sequences, causal, without a cache."""
    config, T = decoder.config, tokens_BT.shape[1]
    position_1T = jnp.arange(T)[None]
    causal_1TT = jnp.tril(jnp.ones((1, T, T), jnp.bool_))
    x_BTD, _ = run_layers(
        decoder,
        params["blocks"],
        embed(config, params, tokens_BT),
        rows_at(config, position_1T, position_1T, causal_1TT),
        None,
        0,
        config.num_layers,
    )
    return unembed(decoder, params, final_norm(config, params, x_BTD))

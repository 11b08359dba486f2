"""The families of models in Hugging Face's form: what their config and tensors mean.

One row of `FAMILIES` each: how keys of `config.json` become fields of `ModelConfig`
where that is not as in Llama, and which tensors become which weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from m2r2_jax.checkpoints import tensors
from m2r2_jax.checkpoints.rope_keys import rope_fields
from m2r2_jax.checkpoints.tensors import Row, Table
from m2r2_jax.models.config import Experts, ModelConfig

_REQUIRED = object()
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}
# Keys that change the maths in one model or another. Where a family reads one, it is
# handled; where it does not, only a value that does nothing is taken.
_MATHS = frozenset(
    """attention_multiplier attn_logit_softcapping attn_temperature_tuning clip_qkv
    decoder_sparse_step embedding_multiplier final_logit_softcapping layer_types
    lm_head_bias logit_scale logits_scaling mlp_only_layers n_routed_experts
    n_shared_experts no_rope_layers norm_topk_prob num_experts num_kv_shared_layers
    num_local_experts partial_rotary_factor quantization_config query_pre_attn_scalar
    residual_multiplier rope_local_base_freq shared_expert_intermediate_size
    shared_intermediate_size sliding_window sliding_window_pattern
    use_bidirectional_attention use_qk_norm use_sliding_window""".split()
)


class Keys:
    """A config's keys, which remembers what was read."""

    def __init__(self, raw: Mapping):
        self.raw, self.read = raw, set()

    def get(self, *names: str, default=_REQUIRED):
        """The first of these keys that has a value.

        Raises:
          ValueError: there is none, and no default.
        """
        self.read.update(names)
        found = (self.raw[name] for name in names if self.raw.get(name) is not None)
        value = next(found, default)
        if value is _REQUIRED:
            raise ValueError(f"config.json has no key {' or '.join(names)}")
        return value


@dataclasses.dataclass(frozen=True)
class Key:
    """A field that is read from a key, None or missing as the field's default."""

    name: str
    convert: Callable = lambda value: value


@dataclasses.dataclass(frozen=True)
class Family:
    """What is not as in Llama.

    Attributes:
      table: tensors of the weights.
      fields: fields of `ModelConfig`: values, or keys they are read from.
      windows: `(keys, number of layers) -> layers with a window`, where the config has
        no `layer_types`.
      renormalise: of experts: whether the chosen ones' weights sum to one; None reads
        `norm_topk_prob`.
      defaults: of keys that the family's older files leave out.
    """

    table: Table
    fields: Mapping[str, object] = dataclasses.field(default_factory=dict)
    windows: Callable[[Keys, int], list[bool]] | None = None
    renormalise: bool | None = None
    defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)


def _every_layer(keys: Keys, count: int) -> list[bool]:
    return [True] * count


def _if_enabled(layers: Callable[[Keys, int], list[bool]]):
    """Qwen keeps a window in its config that is off unless it says so."""

    def windows(keys: Keys, count: int) -> list[bool]:
        chosen = layers(keys, count)
        enabled = keys.get("use_sliding_window", default=False)
        return chosen if enabled else [False] * count

    return windows


def _late_layers(keys: Keys, count: int) -> list[bool]:
    first = keys.get("max_window_layers", default=count)
    return [layer >= first for layer in range(count)]


def _even_layers(keys: Keys, count: int) -> list[bool]:
    return [layer % 2 == 0 for layer in range(count)]


def _even_early_layers(keys: Keys, count: int) -> list[bool]:
    last = keys.get("max_window_layers", default=count)
    return [layer % 2 == 0 and layer < last for layer in range(count)]


def _but_every_sixth(keys: Keys, count: int) -> list[bool]:
    pattern = keys.get("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return [(layer + 1) % pattern != 0 for layer in range(count)]


def _rows(join: tensors.Join, *names: str) -> tuple[Row, ...]:
    return (Row(names, join),)


def _block(join: tensors.Join, *names: str) -> tuple[Row, ...]:
    return _rows(join, *(f"model.layers.{{layer}}.{name}" for name in names))


def _norms(join: tensors.Join, **names: str) -> Table:
    """Norms of a block by the names of their tensors, and the final one."""
    rows = {name: _block(join, f"{tensor}.weight") for name, tensor in names.items()}
    return {**rows, "final_norm": _rows(join, "model.norm.weight")}


def _experts(prefix: str, gate: str, up: str, down: str) -> Table:
    """Experts one by one, or as transformers holds them in memory."""
    one = f"{prefix}.experts.{{expert}}"
    halves = f"{one}.{gate}.weight", f"{one}.{up}.weight"
    fused = f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj"
    return {
        "router": _block(tensors.WHOLE, f"{prefix}.gate.weight"),
        "experts_gate_up": _block(tensors.EXPERT_HALVES, *halves)
        + _block(tensors.FUSED_EXPERT_HALVES, fused[0]),
        "experts_down": _block(tensors.EXPERT_DOWN, f"{one}.{down}.weight")
        + _block(tensors.FUSED_EXPERT_DOWN, fused[1]),
    }


_ATTENTION = "self_attn.q_proj.weight", "self_attn.k_proj.weight"
_LLAMA: Table = {
    "embed": _rows(tensors.WHOLE, "model.embed_tokens.weight"),
    "head": _rows(tensors.WHOLE, "lm_head.weight"),
    **_norms(
        tensors.WHOLE,
        attention_norm="input_layernorm",
        mlp_norm="post_attention_layernorm",
    ),
    "qkv": _block(tensors.QKV, *_ATTENTION, "self_attn.v_proj.weight"),
    "out": _block(tensors.WHOLE, "self_attn.o_proj.weight"),
    "gate_up": _block(tensors.HALVES, "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": _block(tensors.WHOLE, "mlp.down_proj.weight"),
}
_QK_NORMS: Table = {
    "q_norm": _block(tensors.FLAT, "self_attn.q_norm.weight"),
    "k_norm": _block(tensors.FLAT, "self_attn.k_norm.weight"),
}
_GEMMA: Table = {
    **_LLAMA,
    **_norms(
        tensors.PLUS_ONE,
        attention_norm="input_layernorm",
        attention_out_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_out_norm="post_feedforward_layernorm",
        q_norm="self_attn.q_norm",
        k_norm="self_attn.k_norm",
    ),
}
_OLMO2: Table = {
    **_LLAMA,
    **_QK_NORMS,
    **_norms(
        tensors.WHOLE,
        attention_out_norm="post_attention_layernorm",
        mlp_out_norm="post_feedforward_layernorm",
    ),
}
_PHI3: Table = {
    **_LLAMA,
    "qkv": _block(tensors.FUSED_QKV, "self_attn.qkv_proj.weight"),
    "gate_up": _block(tensors.FUSED_HALVES, "mlp.gate_up_proj.weight"),
}
_PROJECTIONS = "gate_proj", "up_proj", "down_proj"
_QWEN_MOE: Table = {**_LLAMA, **_QK_NORMS, **_experts("mlp", *_PROJECTIONS)}
_SHARED = "mlp.shared_expert"
_QWEN2_MOE: Table = {
    **_QWEN_MOE,
    "shared_gate_up": _block(
        tensors.HALVES, f"{_SHARED}.gate_proj.weight", f"{_SHARED}.up_proj.weight"
    ),
    "shared_down": _block(tensors.WHOLE, f"{_SHARED}.down_proj.weight"),
    "shared_gate": _block(tensors.WHOLE, f"{_SHARED}_gate.weight"),
}
_MIXTRAL: Table = {**_LLAMA, **_experts("block_sparse_moe", "w1", "w3", "w2")}
_GRANITE_MOE: Table = {
    **_LLAMA,
    "router": _block(tensors.WHOLE, "block_sparse_moe.router.layer.weight"),
    "experts_gate_up": _block(
        tensors.FUSED_EXPERT_HALVES, "block_sparse_moe.input_linear.weight"
    ),
    "experts_down": _block(
        tensors.FUSED_EXPERT_DOWN, "block_sparse_moe.output_linear.weight"
    ),
}
_GEMMA2_FIELDS = {
    "norms": "both",
    "embed_multiplier": Key("hidden_size", lambda width: width**0.5),
    "attention_scale": Key("query_pre_attn_scalar", lambda scalar: scalar**-0.5),
    "attention_cap": Key("attn_logit_softcapping"),
    "logit_cap": Key("final_logit_softcapping"),
}
_GRANITE_FIELDS = {
    "embed_multiplier": Key("embedding_multiplier"),
    "residual_multiplier": Key("residual_multiplier"),
    "attention_scale": Key("attention_multiplier"),
    "logit_multiplier": Key("logits_scaling", lambda scaling: 1 / scaling),
}
# What Gemma 3's files leave out of their `text_config`.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "tie_word_embeddings": True,
}
_GEMMA3 = Family(
    _GEMMA,
    {**_GEMMA2_FIELDS, "qk_norm": "head"},
    windows=_but_every_sixth,
    defaults=_GEMMA3_DEFAULTS,
)
_HEAD_NORM, _PROJECTION_NORM = {"qk_norm": "head"}, {"qk_norm": "projection"}
FAMILIES: dict[str, Family] = {
    "llama": Family(_LLAMA, defaults={"rope_theta": 1e4}),
    "mistral": Family(_LLAMA, windows=_every_layer),
    "qwen2": Family(_LLAMA, windows=_if_enabled(_late_layers)),
    "qwen3": Family(
        {**_LLAMA, **_QK_NORMS}, _HEAD_NORM, windows=_if_enabled(_late_layers)
    ),
    "gemma2": Family(
        _GEMMA,
        _GEMMA2_FIELDS,
        windows=_even_layers,
        defaults={"tie_word_embeddings": True},
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "phi3": Family(_PHI3, windows=_every_layer),
    "olmo2": Family(_OLMO2, {**_PROJECTION_NORM, "norms": "after"}),
    "granite": Family(_LLAMA, _GRANITE_FIELDS),
    "olmoe": Family(_QWEN_MOE, _PROJECTION_NORM),
    "mixtral": Family(_MIXTRAL, windows=_every_layer, renormalise=True),
    "qwen2_moe": Family(_QWEN2_MOE, windows=_if_enabled(_even_early_layers)),
    "qwen3_moe": Family(_QWEN_MOE, _HEAD_NORM, windows=_if_enabled(_every_layer)),
    "granitemoe": Family(_GRANITE_MOE, _GRANITE_FIELDS, renormalise=True),
}


def family_of(raw: Mapping) -> tuple[Family, Mapping]:
    """The family of a `config.json`, and the config of its text model.

    Raises:
      ValueError: it has no model type, or one that is not supported.
    """
    text = {**raw, **(raw.get("text_config") or {})}
    for model_type in (text.get("model_type"), raw.get("model_type")):
        if model_type in FAMILIES:
            family = FAMILIES[model_type]
            given = {key: value for key, value in text.items() if value is not None}
            return family, {**family.defaults, **given}
    raise ValueError(
        f"model type {raw.get('model_type')!r} is not supported; supported: "
        f"{', '.join(sorted(FAMILIES))}"
    )


def model_config(name: str, raw: Mapping, there: set[str]) -> ModelConfig:
    """The config that a `config.json` describes.

    Args:
      name: of the model.
      raw: the file's content.
      there: names of its tensors, which say whether products have biases.

    Raises:
      ValueError: a model type or a feature that is not supported, or a missing key.
    """
    family, raw = family_of(raw)
    keys = Keys(raw)
    fields = {
        "vocab_size": keys.get("vocab_size"),
        "num_layers": keys.get("num_hidden_layers"),
        "width": keys.get("hidden_size"),
        "num_heads": keys.get("num_attention_heads"),
        "norm_epsilon": keys.get("rms_norm_eps"),
        "activation": _activation(keys),
        "tied_head": keys.get(
            "tie_word_embeddings", default="lm_head.weight" not in there
        ),
        "biases": tuple(_biases(family.table, there)),
        **_widths(keys),
    }
    fields.update(rope_fields(keys, fields["head_dim"]))
    fields["windows"] = _windows(family, keys, fields)
    for field, value in family.fields.items():
        if not isinstance(value, Key):
            fields[field] = value
        elif (read := keys.get(value.name, default=None)) is not None:
            fields[field] = value.convert(read)
    if any("router" == weight for weight in family.table):
        fields.update(_expert_fields(family, keys))
    _refuse_unread(keys)
    return ModelConfig(name=name, **fields)


def _activation(keys: Keys) -> str:
    name = keys.get("hidden_activation", "hidden_act")
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"activation {name!r} is not supported; supported: "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _widths(keys: Keys) -> dict[str, int]:
    heads, width = keys.get("num_attention_heads"), keys.get("hidden_size")
    return {
        "num_kv_heads": keys.get("num_key_value_heads", default=heads),
        "head_dim": keys.get("head_dim", default=width // heads),
        "hidden_width": keys.get("moe_intermediate_size", "intermediate_size"),
    }


def _biases(table: Table, there: set[str]):
    """Products with biases, which are known by their presence."""
    for weight in ("qkv", "out", "gate_up", "down"):
        for row in tensors.rows_of(table, f"{weight}_bias"):
            if there & {name.format(layer=0) for name in row.names}:
                yield weight


def _windows(family: Family, keys: Keys, fields: Mapping) -> tuple[int, ...]:
    """Each layer's window, 0 for none; empty where no layer has one that counts."""
    if family.windows is None:
        return ()
    count = fields["num_layers"]
    windowed = family.windows(keys, count)
    kinds = keys.get("layer_types", default=None)
    if kinds is not None:
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown or len(kinds) != count:
            raise ValueError(
                f"layer_types {kinds} must name full_attention or sliding_attention "
                f"for each of the {count} layers"
            )
        windowed = [kind == "sliding_attention" for kind in kinds]
    size = keys.get("sliding_window", default=0)
    if not size or size >= fields["context_length"]:
        return ()
    return tuple(size if has else 0 for has in windowed) if any(windowed) else ()


def _expert_fields(family: Family, keys: Keys) -> dict:
    """The mixture of experts, which stands in every layer."""
    sparse = keys.get("decoder_sparse_step", default=1)
    dense = keys.get("mlp_only_layers", default=[])
    if sparse != 1 or dense:
        raise ValueError(
            f"decoder_sparse_step {sparse} and mlp_only_layers {dense}: models whose "
            "layers are partly dense are not supported"
        )
    renormalise = family.renormalise
    if renormalise is None:
        renormalise = keys.get("norm_topk_prob")
    experts = Experts(
        count=keys.get("num_experts", "num_local_experts"),
        per_token=keys.get("num_experts_per_tok"),
        renormalise=renormalise,
        shared_width=keys.get("shared_expert_intermediate_size", default=0),
    )
    return {"experts": experts}


def _refuse_unread(keys: Keys) -> None:
    """Raises ValueError when a key that changes the maths has not been read."""
    values = {name: keys.raw[name] for name in sorted(_MATHS & keys.raw.keys())}
    unread = [
        f"{name}={str(value):.60}"
        for name, value in values.items()
        if name not in keys.read and not _does_nothing(value)
    ]
    if unread:
        raise ValueError(
            f"config.json asks a {keys.raw.get('model_type')} model for what is not "
            f"supported: {', '.join(unread)}"
        )


def _does_nothing(value) -> bool:
    """Whether a feature with this value is off; factors are off at one."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return not value or (is_number and value == 1)

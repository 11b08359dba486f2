"""What GGUF metadata may say: one table of keys, their types and their limits.

A row says which values are served here. Keys under the architecture's prefix that are
in no row are refused: they may change the maths. Another family is more rows, or its
name in `families` of the rows that it shares.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from m2r2_jax.checkpoints.gguf_limits import (
    Limit,
    between,
    divides_heads,
    equal,
    even,
    has_bos,
    have_rows,
    have_tensors,
    is_token,
    no_scaling,
    no_window,
    not_empty,
    one_of,
    one_per_token,
    pairs_of_tokens,
    usual_scale,
    valid_texts,
)

FAMILIES = ("llama",)
_REQUIRED = object()
_KINDS = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list of texts",
    np.ndarray: "a list of whole numbers",
}
_MAX_PROBLEMS = 20  # shown; a file that is damaged may have any number


@dataclasses.dataclass(frozen=True)
class Key:
    """A row of the table.

    Attributes:
      name: the key; `{}` stands for the architecture.
      field: what the program calls it.
      kind: Python type of the value; an int will do for a float. `np.ndarray` is a list
        of whole numbers.
      limits: each says what is wrong, in order; the first to complain is reported.
      default: value of a file without the key, or a function of the fields so far.
      per_layer: whether it may be a list of one value for each layer: the served ones
        are all the same.
      families: architectures that have it; all by default.
    """

    name: str
    field: str
    kind: type
    limits: tuple[Limit, ...] = ()
    default: Any = _REQUIRED
    per_layer: bool = False
    families: tuple[str, ...] = FAMILIES


def neutral(name: str, field: str, *allowed: Any, but: str, per_layer=False) -> Key:
    """A key that is refused unless its value changes nothing, as without the key."""
    kind = type(allowed[0])
    limits = (one_of(*allowed, but=but),)
    return Key(name, field, kind, limits, default=allowed[0], per_layer=per_layer)


_DENSE = "Mixture-of-Experts files are not supported yet"
_ELSEWHERE = "other models' maths, not supported here"
_ROTATED = "a head of which a part is rotated is not supported"
_SIZE = between(1, 2**20)
ARCHITECTURE_KEY = Key(
    "general.architecture", "architecture", str, (one_of(*FAMILIES),)
)
# Later rows may ask for fields of earlier ones.
MODEL_KEYS = (
    Key("general.name", "name", str, (), default="unnamed"),
    neutral("split.count", "parts", 0, 1, but="join the parts: gguf-split --merge"),
    Key("{}.block_count", "num_layers", int, (between(1, 1024), have_tensors)),
    Key("{}.context_length", "context_length", int, (between(1, 2**30),)),
    Key("{}.embedding_length", "width", int, (_SIZE,)),
    Key("{}.feed_forward_length", "hidden_width", int, (_SIZE,), per_layer=True),
    Key("{}.attention.head_count", "num_heads", int, (_SIZE,), per_layer=True),
    Key(
        "{}.attention.head_count_kv",
        "num_kv_heads",
        int,
        (_SIZE, divides_heads),
        default=lambda fields: fields["num_heads"],
        per_layer=True,
    ),
    Key(
        "{}.attention.key_length",
        "head_dim",
        int,
        (_SIZE, even),
        default=lambda fields: fields["width"] // fields["num_heads"],
    ),
    Key(
        "{}.attention.value_length",
        "value_dim",
        int,
        (equal("head_dim", "attention.key_length", "others are not supported"),),
        default=lambda fields: fields["head_dim"],
    ),
    Key(
        "{}.attention.layer_norm_rms_epsilon",
        "norm_epsilon",
        float,
        (between(1e-12, 0.1),),
    ),
    Key("{}.rope.freq_base", "rope_theta", float, (between(1, 1e12),), default=1e4),
    Key(
        "{}.rope.dimension_count",
        "rope_dim",
        int,
        (equal("head_dim", "the head's width", _ROTATED),),
        default=lambda fields: fields["head_dim"],
    ),
    # llama.cpp takes a factor without a type as linear scaling.
    Key(
        "{}.rope.scaling.type",
        "rope_scaling",
        str,
        (one_of("none", "linear", but="other rotary scalings are not supported"),),
        default="linear",
    ),
    Key("{}.rope.scaling.factor", "rope_factor", float, (no_scaling,), default=1.0),
    Key("{}.rope.scale_linear", "rope_linear", float, (no_scaling,), default=1.0),
    neutral("{}.rope.scaling.attn_factor", "rope_gain", 1.0, but=_ELSEWHERE),
    Key(
        "{}.attention.sliding_window",
        "window",
        int,
        (no_window,),
        default=0,
        per_layer=True,
    ),
    neutral("{}.attention.causal", "causal", True, but="encoders are not supported"),
    Key("{}.attention.scale", "attention_scale", float, (usual_scale,), default=0.0),
    neutral("{}.attention.max_alibi_bias", "alibi", 0.0, but=_ELSEWHERE),
    neutral("{}.attention.clamp_kqv", "clamp", 0.0, but=_ELSEWHERE),
    neutral("{}.attn_logit_softcapping", "score_cap", 0.0, but=_ELSEWHERE),
    neutral("{}.final_logit_softcapping", "logit_cap", 0.0, but=_ELSEWHERE),
    neutral("{}.logit_scale", "logit_scale", 1.0, 0.0, but=_ELSEWHERE),
    neutral("{}.residual_scale", "residual_scale", 1.0, 0.0, but=_ELSEWHERE),
    neutral("{}.embedding_scale", "embedding_scale", 1.0, 0.0, but=_ELSEWHERE),
    neutral("{}.use_parallel_residual", "parallel", False, but=_ELSEWHERE),
    neutral("{}.expert_count", "num_experts", 0, but=_DENSE),
)
# Keys that say nothing a program needs, given what the rows above allow.
UNREAD_KEYS = (
    "{}.vocab_size",
    "{}.tensor_data_layout",
    "{}.pooling_type",
    "{}.attention.layer_norm_epsilon",
    "{}.rope.scaling.original_context_length",
    "{}.rope.scaling.finetuned",
    "{}.rope.scaling.yarn_log_multiplier",
    "{}.rope.scaling.yarn_ext_factor",
    "{}.rope.scaling.yarn_attn_factor",
    "{}.rope.scaling.yarn_beta_fast",
    "{}.rope.scaling.yarn_beta_slow",
    "{}.expert_used_count",
    "{}.expert_shared_count",
    "{}.expert_feed_forward_length",
)
TOKENIZER_KEYS = (
    Key("tokenizer.ggml.model", "model", str, (one_of("gpt2"),)),
    Key("tokenizer.ggml.pre", "pre", str, default=None),
    Key("tokenizer.ggml.tokens", "tokens", list, (not_empty, valid_texts, have_rows)),
    Key("tokenizer.ggml.token_type", "types", np.ndarray, (one_per_token,), None),
    Key("tokenizer.ggml.merges", "merges", list, (valid_texts, pairs_of_tokens)),
    Key("tokenizer.ggml.bos_token_id", "bos_id", int, (is_token,), None),
    Key("tokenizer.ggml.eos_token_id", "eos_id", int, (is_token,), None),
    Key("tokenizer.ggml.eot_token_id", "eot_id", int, (is_token,), None),
    Key("tokenizer.ggml.eom_token_id", "eom_id", int, (is_token,), None),
    Key("tokenizer.ggml.add_bos_token", "add_bos", bool, (has_bos,), None),
    Key("tokenizer.chat_template.default", "default_template", str, (), ""),
    Key(
        "tokenizer.chat_template",
        "chat_template",
        str,
        default=lambda fields: fields["default_template"],
    ),
)


def read(
    metadata: Mapping[str, object],
    keys: Iterable[Key],
    problems: list[str],
    *,
    architecture: str = "",
    **known: object,
) -> dict[str, Any]:
    """Reads rows of the table.

    Args:
      metadata: keys to plain values.
      keys: the rows.
      problems: gets a line for each value that is not served.
      architecture: whose rows to read, and what `{}` in their names stands for.
      known: fields that do not come from metadata.

    Returns:
      Sound values by field: those of `known`, and of each row without a problem.
    """
    fields = dict(known)
    for key in keys:
        if architecture and architecture not in key.families:
            continue
        name = key.name.format(architecture)
        try:
            value = _default(key, fields) if name not in metadata else metadata[name]
        except KeyError:  # it follows from a field that has a problem of its own
            continue
        if value is _REQUIRED:
            problems.append(f"{name} is missing; convert the model to GGUF again")
            continue
        sound, complaint = _checked(key, value, fields)
        if complaint:
            problems.append(f"{name} is {_short(value)}: {complaint}")
        else:
            fields[key.field] = sound
    return fields


def refuse_unknown(
    metadata: Mapping[str, object], architecture: str, problems: list[str]
) -> None:
    """Adds a problem for every key of the architecture that no row knows."""
    known = {
        name.format(architecture)
        for name in (*UNREAD_KEYS, *(key.name for key in MODEL_KEYS))
    }
    for name in metadata:
        if name.startswith(f"{architecture}.") and name not in known:
            problems.append(
                f"{name} is {_short(metadata[name])}: the key is not known here and "
                "may change what the model computes; where it does not, take it out "
                f"(gguf-new-metadata --remove-metadata {name} IN OUT)"
            )


def raise_problems(source: str, problems: list[str]) -> None:
    """Raises one ValueError of all problems of a source, if there are any."""
    if problems:
        more = len(problems) - _MAX_PROBLEMS
        shown = problems[:_MAX_PROBLEMS] + [f"and {more} more"] * (more > 0)
        lines = "".join(f"\n  {problem}" for problem in shown)
        raise ValueError(
            f"{source} cannot be used:{lines}\n"
            "Fetch the file or convert the model again, or take another file"
        )


def _default(key: Key, fields: Mapping[str, Any]) -> Any:
    return key.default(fields) if callable(key.default) else key.default


def _checked(key: Key, value: Any, fields: Mapping[str, Any]) -> tuple[Any, str | None]:
    """A value as its row wants it, and what is wrong with it."""
    if value is None:  # not there, and need not be
        return None, None
    value = _plain(key, value)
    if isinstance(value, bytes):
        return value, "must be valid UTF-8 of at most 1 MiB"
    is_array = isinstance(value, np.ndarray)
    if type(value) is not key.kind or is_array and value.dtype.kind not in "iu":
        same = ", the same for every layer" if key.per_layer else ""
        return value, f"must be {_KINDS[key.kind]}{same}"
    complaints = (_complaint(limit, value, fields) for limit in key.limits)
    return value, next(filter(None, complaints), None)


def _plain(key: Key, value: Any) -> Any:
    """The forms that do as well: 1 for 1.0, equal values of all layers, a list."""
    if isinstance(value, list) and value and all(type(v) is int for v in value):
        value = np.asarray(value)
    if key.per_layer and isinstance(value, np.ndarray):
        if value.size and (value == value[0]).all():
            value = value[0].item()
    return float(value) if key.kind is float and type(value) is int else value


def _complaint(limit: Limit, value: Any, fields: Mapping[str, Any]) -> str | None:
    try:
        return limit(value, fields)
    except KeyError:
        return None


def _short(value: Any) -> str:
    if isinstance(value, np.ndarray):
        value = value[:7].tolist()
    return reprlib.repr(value[:40] if isinstance(value, bytes) else value)

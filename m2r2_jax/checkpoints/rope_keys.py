"""Rotary angles in a `config.json`, in the forms that its writers have used.

Older files have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`, flat or
by kind of layer. A theta that is nowhere is an error unless the family has a default:
a silent one gives fluent nonsense.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from m2r2_jax.models.rotary import Linear, Llama3, LongRope, Scaling, Yarn

_ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"}
_KNOWN = {
    "default": set(),
    "linear": set(),
    "llama3": {
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "yarn": {
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
    "longrope": {
        "original_max_position_embeddings",
        "attention_factor",
        "short_factor",
        "long_factor",
    },
}


def rope_fields(keys, head_dim: int) -> dict:
    """Fields of `ModelConfig` that say how queries and keys are turned.

    Args:
      keys: of the config, `families.Keys`.
      head_dim: of the model.

    Raises:
      ValueError: a scaling that is not supported, or a missing key.
    """
    full, window_theta = _parameters(keys)
    context = keys.get("max_position_embeddings")
    theta = full.get("rope_theta")
    fields = {
        "rope_theta": float(keys.get("rope_theta") if theta is None else theta),
        "context_length": context,
        "window_rope_theta": window_theta,
    }
    part = full.get("partial_rotary_factor")
    part = keys.get("partial_rotary_factor", default=1.0) if part is None else part
    if part != 1:
        fields["rotary_dim"] = int(head_dim * part)
    original = keys.get("original_max_position_embeddings", default=None)
    # The same number stands in one place or the other.
    full = {"original_max_position_embeddings": original, **_given(full)}
    scaling = _scaling(full, context)
    if isinstance(scaling, LongRope):
        # Keys turned for one context do not fit queries turned for another: the one
        # that short texts were trained with is the default.
        fields["context_length"] = min(context, scaling.original_context)
    return {**fields, "rope_scaling": scaling}


def _parameters(keys) -> tuple[Mapping, float | None]:
    """What turns layers without a window, and theta of layers with one."""
    parameters = keys.get("rope_parameters", "rope_scaling", default={})
    local = keys.get("rope_local_base_freq", default=None)
    if "full_attention" not in parameters:
        return parameters, local
    full, sliding = parameters["full_attention"], parameters.get("sliding_attention")
    if sliding is None:
        return full, local
    if sliding.get("rope_type", "default") != "default":
        raise ValueError(
            f"rotary scaling {sliding} of layers with a window is not supported"
        )
    return full, float(sliding.get("rope_theta", local))


def _given(parameters: Mapping) -> dict:
    return {key: value for key, value in parameters.items() if value is not None}


def _scaling(parameters: Mapping, context: int) -> Scaling | None:
    """The scaling that a dict of parameters describes."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # As Phi-3's first files call it.
    if kind not in _KNOWN:
        raise ValueError(
            f"rotary scaling {kind!r} is not supported; supported: {', '.join(_KNOWN)}"
        )
    top = {"original_max_position_embeddings"}
    if unknown := parameters.keys() - _ALWAYS - _KNOWN[kind] - top:
        raise ValueError(
            f"rotary scaling {kind!r} has keys that are not supported: "
            f"{', '.join(sorted(unknown))}"
        )

    def get(key: str):
        if parameters.get(key) is None:
            raise ValueError(f"rotary scaling {kind!r} has no key {key!r}")
        return parameters[key]

    if kind == "default":
        return None
    if kind == "linear":
        return Linear(float(get("factor")))
    original = int(get("original_max_position_embeddings"))
    if kind == "llama3":
        low, high = get("low_freq_factor"), get("high_freq_factor")
        return Llama3(float(get("factor")), low, high, original)
    factor = float(parameters.get("factor") or context / original)
    if kind == "yarn":
        return _yarn(parameters, factor, original)
    stretch = parameters.get("attention_factor")
    if stretch is None:
        growth = math.log(max(factor, 1)) / math.log(original)
        stretch = math.sqrt(1 + growth)
    divisors = tuple(get("short_factor")), tuple(get("long_factor"))
    return LongRope(*divisors, original, float(stretch))


def _yarn(parameters: Mapping, factor: float, original: int) -> Yarn:
    def stretch(weight: float) -> float:
        return 0.1 * weight * math.log(max(factor, 1)) + 1

    # A value that is given replaces the computed one.
    attention = parameters.get("attention_factor")
    if attention is None:
        above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
        both = above and below
        attention = stretch(above) / stretch(below) if both else stretch(1)
    return Yarn(
        factor,
        original,
        float(attention),
        float(parameters.get("beta_fast") or 32),
        float(parameters.get("beta_slow") or 1),
        parameters.get("truncate", True),
    )

"""Decoding methods by name: what drafts, and what it was trained to."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import jax

from m2r2_jax.checkpoints.accelerators import (
    TrainedAccelerators,
    load_accelerators,
    shipped_accelerators,
)
from m2r2_jax.checkpoints.model import Model
from m2r2_jax.decoding.drafting import Drafter
from m2r2_jax.drafters import MultiRateChain, NoDrafts, PromptLookup, RandomDraft
from m2r2_jax.drafters.draft_head import draft_head
from m2r2_jax.models import multirate
from m2r2_jax.models.multirate import MultiRateConfig
from m2r2_jax.models.transformer import like_matrices, unroll


@dataclasses.dataclass(frozen=True, eq=False)
class Method:
    """A decoding method, ready to run on one model.

    Attributes:
      name: as in `METHODS`.
      drafter: what proposes; nothing in plain decoding.
      params: what the drafter reads beside the model's parameters.
      note: what a reader of its numbers has to know, such as missing training.
      trainable_parameters: parameters that were trained for this method.
    """

    name: str
    drafter: Drafter = NoDrafts()
    params: dict = dataclasses.field(default_factory=dict)
    note: str = ""
    trainable_parameters: int = 0


def _autoregressive(model: Model) -> Method:
    """Plain decoding."""
    del model
    return Method("autoregressive")


def _prompt_lookup(
    model: Model, *, length: int = 7, max_ngram: int = 4, min_ngram: int = 3
) -> Method:
    """Drafts copied from earlier text; no parameters. Seven and the root are eight
    rows: on a CPU with 16 vector registers nine cost as much as 16 (`products.linear`).
    """
    del model
    return Method("prompt_lookup", PromptLookup(length, max_ngram, min_ngram))


def _m2r2(
    model: Model,
    *,
    accelerators: str = "",
    length: int | None = None,
    min_confidence: float | None = None,
) -> Method:
    """Drafts from the accelerated residual stream of the first layers.

    Uses the accelerators of a file, or those that are shipped for the model, with the
    settings stored beside them. Without any, a plain early exit drafts.
    """
    path = accelerators or shipped_accelerators(model.config.name)
    if not path:
        given = {"length": length, "min_confidence": min_confidence}
        given = {name: value for name, value in given.items() if value is not None}
        method = _early_exit(model, **given)
        note = f"no accelerators are trained for {model.config.name}: {method.note}"
        return dataclasses.replace(method, name="m2r2", note=note)
    trained = load_accelerators(path, model.config)
    settings = trained.settings
    drafter = MultiRateChain(
        trained.rates.exit_layer,
        settings.length if length is None else length,
        settings.min_confidence if min_confidence is None else min_confidence,
    )
    size = sum(leaf.size for leaf in jax.tree.leaves(trained.params))
    params = _stream_params(model, trained)
    return Method("m2r2", drafter, params, trainable_parameters=size)


def _early_exit(
    model: Model, *, exit_layer: int = 2, length: int = 1, min_confidence: float = 0.9
) -> Method:
    """Drafts from the same layers untrained: what the accelerators have to beat."""
    rates = MultiRateConfig(exit_layer, rank=1)
    params = multirate.init_accelerators(model.config, rates, jax.random.key(0))
    untrained = TrainedAccelerators(model.config.name, rates, params, None)
    drafter = MultiRateChain(exit_layer, length, min_confidence)
    return Method(
        "early_exit",
        drafter,
        _stream_params(model, untrained),
        note="an untrained exit drafts",
    )


def _stream_params(model: Model, trained: TrainedAccelerators) -> dict:
    """What the drafter reads, stored as the model is."""
    params = like_matrices(model.params, trained.params)
    if model.unrolled:
        params["layers"] = unroll(params["layers"])
    head = draft_head(model.config, model.params, trained.head_ids)
    return {"accelerators": params, "head": head}


def _random_draft(model: Model, *, length: int = 1) -> Method:
    """Drafts drawn at random: what verification alone costs."""
    del model
    return Method("random_draft", RandomDraft(length))


METHODS: dict[str, Callable[..., Method]] = {
    "autoregressive": _autoregressive,
    "prompt_lookup": _prompt_lookup,
    "m2r2": _m2r2,
    "early_exit": _early_exit,
    "random_draft": _random_draft,
}


def build_method(name: str, model: Model, **settings: float | str) -> Method:
    """Builds a decoding method.

    Args:
      name: one of `METHODS`.
      model: the model it will run on.
      **settings: the method's own, such as `length` for drafters.

    Raises:
      ValueError: an unknown method or setting, with what is known.
    """
    if name not in METHODS:
        raise ValueError(
            f"unknown method {name!r}; choose from {', '.join(sorted(METHODS))}"
        )
    known = list(inspect.signature(METHODS[name]).parameters)[1:]
    if unknown := set(settings) - set(known):
        raise ValueError(
            f"method {name!r} has no setting {', '.join(sorted(unknown))}; it has "
            f"{', '.join(known) or 'none'}"
        )
    return METHODS[name](model, **settings)

"""Decoding methods by name: what drafts, and how many rows a plain step has."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import jax

from m2r2_jax import multirate
from m2r2_jax.accelerators import (
    DraftSettings,
    TrainedAccelerators,
    load_accelerators,
    shipped_accelerators,
)
from m2r2_jax.drafters import MultiRateChain, PromptLookup, RandomDraft
from m2r2_jax.model import Model
from m2r2_jax.multirate import MultiRateConfig
from m2r2_jax.speculative import Drafter
from m2r2_jax.transformer import unroll

EXACT_ROWS = 2  # From two rows up, f32 products are bitwise equal row by row on CPU.


@dataclasses.dataclass(frozen=True, eq=False)
class Method:
    """A decoding method, ready to run on one model.

    Attributes:
      name: as in `METHODS`.
      drafter: None for plain decoding.
      params: what the drafter reads beside the model's parameters.
      rows: rows of a pass without drafts: 1, or `EXACT_ROWS`.
      note: what a reader of its numbers has to know, such as missing training.
    """

    name: str
    drafter: Drafter | None = None
    params: dict = dataclasses.field(default_factory=dict)
    rows: int = 1
    note: str = ""

    @property
    def trainable_parameters(self) -> int:
        """Parameters that were, or would be, trained for this method."""
        return sum(
            leaf.size for leaf in jax.tree.leaves(self.params.get("accelerators", {}))
        )


def _autoregressive(model: Model) -> Method:
    """Plain decoding, one row per step."""
    del model
    return Method("autoregressive")


def _prompt_lookup(
    model: Model, *, length: int = 8, max_ngram: int = 4, min_ngram: int = 3
) -> Method:
    """Drafts copied from earlier text; no parameters."""
    del model
    return Method("prompt_lookup", PromptLookup(length, max_ngram, min_ngram))


def _m2r2(
    model: Model,
    *,
    accelerators: str = "",
    length: int | None = None,
    min_confidence: float | None = None,
    exit_layer: int = 2,
    rank: int = 32,
) -> Method:
    """Drafts from the accelerated residual stream of the first layers.

    Uses the accelerators of a file, or those that are shipped for the model, with the
    settings stored beside them; else untrained ones of the given exit and rank.
    """
    path = accelerators or shipped_accelerators(model.config.name)
    if path:
        trained, note = load_accelerators(path, model.config), ""
    else:
        trained = _untrained(model, MultiRateConfig(exit_layer, rank))
        note = "accelerators are untrained (zero): a plain early exit drafts"
    settings = trained.settings
    drafter = MultiRateChain(
        model.config,
        trained.rates.exit_layer,
        settings.length if length is None else length,
        settings.min_confidence if min_confidence is None else min_confidence,
    )
    params = multirate.like_matrices(model.params, trained.params)
    if model.unrolled:
        params["layers"] = unroll(params["layers"])
    head = multirate.draft_head(model.params, trained.head_ids)
    return Method("m2r2", drafter, {"accelerators": params, "head": head}, note=note)


def _untrained(model: Model, rates: MultiRateConfig) -> TrainedAccelerators:
    params = multirate.init_accelerators(model.config, rates, jax.random.key(0))
    settings = DraftSettings(length=1, min_confidence=0.9)
    return TrainedAccelerators(model.config.name, rates, params, None, settings)


def _random_draft(model: Model, *, length: int = 1) -> Method:
    """Drafts drawn at random: what verification alone costs."""
    return Method("random_draft", RandomDraft(model.config.vocab_size, length))


METHODS: dict[str, Callable[..., Method]] = {
    "autoregressive": _autoregressive,
    "prompt_lookup": _prompt_lookup,
    "m2r2": _m2r2,
    "random_draft": _random_draft,
}


def build_method(
    name: str, model: Model, *, exact: bool = False, **settings: float
) -> Method:
    """Builds a decoding method.

    Args:
      name: one of `METHODS`.
      model: the model it will run on.
      exact: run plain steps with two rows, so that in f32 on CPU every method gives
        bitwise the same logits (slower; for equality tests).
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
    method = METHODS[name](model, **settings)
    return dataclasses.replace(method, rows=EXACT_ROWS if exact else 1)

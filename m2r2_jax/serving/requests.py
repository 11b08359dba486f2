"""What a run is asked for, checked as a whole before any device work."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from m2r2_jax.checkpoints.model import Model
from m2r2_jax.decoding.settings import SamplingParams

_TRUNCATE = ("answer", "prompt")


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt a row, and how each is to be answered.

    Attributes:
      prompts: token ids of each row, within the context.
      limits: length at which each row stops at the latest.
      sampling: settings of each row.
      stop: strings that end an answer.
      logprobs: whether log-probabilities are computed.
      eos_ids: ids that end an answer.
    """

    prompts: list[list[int]]
    limits: list[int]
    sampling: tuple[SamplingParams, ...]
    stop: tuple[str, ...]
    logprobs: bool
    eos_ids: frozenset[int]


def make_request(
    model: Model,
    batch: int,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    *,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    stop: Sequence[str] = (),
    logprobs: bool = False,
    eos_ids: frozenset[int] | None = None,
    truncate: str | None = None,
) -> Request:
    """Checks and completes what is asked of a batch.

    Args:
      model: whose vocabulary and context are the limits.
      batch: rows (B).
      prompts: B lists of token ids, none empty.
      max_new_tokens: at most this many ids, for all rows or for each.
      sampling: settings of all rows, or of each; greedy by default.
      stop: strings that end an answer.
      logprobs: whether to compute the log-probability of each token.
      eos_ids: ids that end an answer; the tokenizer's by default, may be empty.
      truncate: what gives way where prompt and new tokens exceed the context:
        "answer" (fewer new tokens) or "prompt" (its oldest tokens); an error by
        default.

    Raises:
      ValueError: a prompt that is empty or does not fit, or a setting out of range.
    """
    if truncate not in (None, *_TRUNCATE):
        raise ValueError(f"truncate {truncate!r} is none of {', '.join(_TRUNCATE)}")
    if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
        raise ValueError(f"stop {stop!r} must be a list of non-empty strings")
    if len(prompts) != batch:
        raise ValueError(f"{len(prompts)} prompts for a session of {batch} rows")
    counts = _each(max_new_tokens, (int, np.integer), batch, "max_new_tokens")
    settings = _each(sampling or SamplingParams(), SamplingParams, batch, "sampling")
    for params in settings:
        params.check_ids(model.config.vocab_size)
    rows = [
        _fit(model, row, [int(id) for id in prompt], count, truncate)
        for row, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
    ]
    return Request(
        prompts=[prompt for prompt, _ in rows],
        limits=[limit for _, limit in rows],
        sampling=tuple(settings),
        stop=tuple(stop),
        logprobs=logprobs,
        eos_ids=model.tokenizer.eos_ids if eos_ids is None else eos_ids,
    )


def _each(value, kind, batch: int, name: str) -> list:
    """A value for every row, from one for all or one for each."""
    values = [value] * batch if isinstance(value, kind) else list(value)
    if len(values) != batch:
        raise ValueError(
            f"{len(values)} values of {name} for a session of {batch} rows"
        )
    return values


def _fit(
    model: Model, row: int, prompt: list[int], count: int, truncate: str | None
) -> tuple[list[int], int]:
    """A prompt and its limit within the context."""
    context, vocab_size = model.config.context_length, model.config.vocab_size
    if count < 0:
        raise ValueError(f"max_new_tokens {count} must not be negative")
    if not prompt:
        raise ValueError(f"prompt {row} is empty; give at least one token")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise ValueError(
            f"prompt {row} has ids from {min(prompt)} to {max(prompt)}; the "
            f"vocabulary has 0..{vocab_size - 1}"
        )
    if truncate == "prompt" and count < context:
        prompt = prompt[-(context - count) :]
    if len(prompt) + (1 if truncate == "answer" else count) > context:
        raise ValueError(
            f"prompt {row} has {len(prompt)} tokens and may get {count} new ones, the "
            f"context holds {context}; shorten the prompt, lower max_new_tokens, or "
            'pass truncate="answer" or truncate="prompt"'
        )
    return prompt, min(len(prompt) + count, context)

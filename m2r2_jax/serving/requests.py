"""What a run is asked for, checked as a whole before any device work."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from m2r2_jax.checkpoints.model import Model
from m2r2_jax.decoding.settings import SamplingParams, integer

_TRUNCATE = ("answer", "prompt")


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt a row, and how each is to be answered.

    Attributes:
      prompts: token ids of each row, within the context.
      limits: length at which each row stops at the latest.
      numbers: what each row is called in errors.
      sampling: settings of each row.
      stop: strings that end an answer.
      logprobs: whether log-probabilities are computed.
      eos_ids: ids that end an answer.
    """

    prompts: list[list[int]]
    limits: list[int]
    numbers: list[int]
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
    stop: Iterable[str] | None = (),
    logprobs: bool = False,
    eos_ids: frozenset[int] | None = None,
    truncate: str | None = None,
    first: int = 0,
) -> Request:
    """Checks and completes what is asked of a batch.

    Args:
      model: whose vocabulary and context are the limits.
      batch: rows (B).
      prompts: B lists of token ids, none empty.
      max_new_tokens: at most this many ids, for all rows or for each.
      sampling: settings of all rows, or of each; greedy by default. Rows with one
        seed draw alike: equal prompts get equal answers.
      stop: strings that end an answer; None is none.
      logprobs: whether to compute the log-probability of each token.
      eos_ids: ids that end an answer; the tokenizer's by default, may be empty.
      truncate: what gives way where prompt and new tokens exceed the context:
        "answer" (fewer new tokens) or "prompt" (its oldest tokens); an error by
        default.
      first: what the first row is called in errors.

    Raises:
      ValueError: a prompt that is empty or does not fit, or a setting out of range.
    """
    if truncate not in (None, *_TRUNCATE):
        raise ValueError(f"truncate {truncate!r} is none of {', '.join(_TRUNCATE)}")
    if len(prompts) != batch:
        raise ValueError(f"{len(prompts)} prompts for a session of {batch} rows")
    counts = [
        new_tokens(count) for count in _each(max_new_tokens, batch, "max_new_tokens")
    ]
    sampling = SamplingParams() if sampling is None else sampling
    settings = _each(sampling, batch, "sampling")
    numbers = [*range(first, first + batch)]
    for each in zip(numbers, settings, counts, strict=True):
        _check_settings(model, *each)
    rows = [
        _fit(model, number, _ids(number, prompt), count, truncate)
        for number, prompt, count in zip(numbers, prompts, counts, strict=True)
    ]
    return Request(
        prompts=[prompt for prompt, _ in rows],
        limits=[limit for _, limit in rows],
        numbers=numbers,
        sampling=tuple(settings),
        stop=stop_strings(stop),
        logprobs=logprobs,
        eos_ids=model.tokenizer.eos_ids if eos_ids is None else eos_ids,
    )


def stop_strings(stop: Iterable[str] | None) -> tuple[str, ...]:
    """Stop strings, taken from whatever holds them.

    Raises:
      ValueError: they are not non-empty strings, or one string alone.
    """
    alone = isinstance(stop, str) or not isinstance(stop, Iterable | None)
    strings = () if alone else tuple(stop or ())
    if alone or not all(isinstance(string, str) and string for string in strings):
        raise ValueError(f"stop {stop!r:.60} must be a list of non-empty strings")
    return strings


def new_tokens(count: Any) -> int:
    """How many new tokens an answer may have.

    Raises:
      ValueError: no integer of 0 or more.
    """
    count = integer("max_new_tokens", count, "0 or more")
    return count


def _check_settings(model: Model, row: int, params: SamplingParams, count: int) -> None:
    """Raises ValueError where a row's settings suit neither the model nor its limit."""
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling of row {row} is {params!r:.60}, no SamplingParams")
    params.check_ids(model.config.vocab_size)
    if params.min_new_tokens > count:
        raise ValueError(
            f"min_new_tokens {params.min_new_tokens} of row {row} is above its "
            f"max_new_tokens {count}; lower one or raise the other"
        )


def _ids(row: int, prompt: Iterable[int]) -> list[int]:
    if isinstance(prompt, str) or not isinstance(prompt, Iterable):
        raise ValueError(f"prompt {row} is {prompt!r:.60}, not a list of token ids")
    return [integer(f"prompt {row}: token id", id) for id in prompt]


def _each(value, batch: int, name: str) -> list:
    """A value for every row, from one for all or one for each."""
    many = isinstance(value, Iterable) and not isinstance(value, str)
    values = list(value) if many else [value] * batch
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

"""A request's settings: how its tokens are chosen, checked where they are given."""

from __future__ import annotations

import dataclasses
import numbers
import secrets
from collections.abc import Callable, Mapping
from typing import Any

# No setting moves a logit further, so that none can overflow; what settings have
# brought below its negative is never chosen (`adjustments`).
LIMIT = 1e6
_SEEDS = 2**64
# From one prompt's seed to the next: odd, so that no two of a batch are the same, and
# far apart, so that neighbouring seeds have no texts in common.
_SEED_STEP = 0x9E3779B97F4A7C15


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Numbers may be numpy's; they are kept as Python's.

    Attributes:
      temperature: 0 is greedy.
      top_k: only the k likeliest tokens; 0 is all.
      top_p: only the likeliest tokens that together have this probability, after
        top_k; 1 is all.
      min_p: only tokens at least this fraction as likely as the likeliest; 0 is all.
      seed: the same seed gives the same text, whatever drafts, and beside whom. Any
        integer of 64 bits, a negative one standing for the unsigned one of the same
        bits; None draws a fresh one, which is then kept here.
      repetition_penalty: divides positive and multiplies negative logits of tokens in
        prompt or answer (CTRL, arXiv 1909.05858); 1 is none.
      presence_penalty: taken from logits of tokens in the answer.
      frequency_penalty: taken from them once per appearance.
      logit_bias: added to the logits of these ids; -1e6 and less, and minus infinity,
        forbid an id.
      min_new_tokens: before so many tokens neither an ending id nor a stop string
        ends the answer.

    Raises:
      ValueError: a value of a wrong type, or out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    min_new_tokens: int = 0

    def __post_init__(self):
        if self.seed is None:
            self._keep("seed", secrets.randbits(64))
        for name, (convert, good, wanted) in _RANGES.items():
            value = getattr(self, name)
            found = convert(name, value, wanted)
            if not good(found):
                raise ValueError(f"{name} {value!r} must be {wanted}")
            self._keep(name, found)
        self._keep("logit_bias", _biases(self.logit_bias))

    def _keep(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def check_ids(self, vocab_size: int) -> None:
        """Raises ValueError when a biased id is outside the vocabulary."""
        for id in self.logit_bias:
            if not 0 <= id < vocab_size:
                raise ValueError(
                    f"logit_bias names id {id}; the vocabulary has 0..{vocab_size - 1}"
                )

    def for_prompt(self, index: int) -> SamplingParams:
        """The settings of prompt `index` of a batch: a seed of its own.

        It is `(seed + index * 0x9E3779B97F4A7C15) % 2**64`; the first prompt has the
        seed itself, so that a batch of one is a single request.
        """
        if index == 0:
            return self
        seed = (self.seed + index * _SEED_STEP) % _SEEDS
        return dataclasses.replace(self, seed=seed)


def integer(name: str, value: Any, wanted: str = "") -> int:
    """A setting's value as an int.

    Raises:
      ValueError: it is no integer; one of numpy's is, a bool and "3" are none.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        also = f", {wanted}" if wanted else ""
        raise ValueError(f"{name} {value!r:.60} must be an integer{also}")
    return int(value)


def _number(name: str, value: Any, wanted: str) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise ValueError(f"{name} {value!r:.60} must be {wanted}")
    return float(value)


def _biases(given: Any) -> dict[int, float]:
    """Biases by id as Python's numbers."""
    wrong = ValueError(
        f"logit_bias {given!r:.60} must map token ids to numbers of at most {LIMIT:g}"
    )
    if not isinstance(given, Mapping):
        raise wrong
    try:
        found = {integer("", id): _number("", bias, "") for id, bias in given.items()}
    except ValueError:
        raise wrong from None
    if not all(bias <= LIMIT for bias in found.values()):  # A NaN is not.
        raise wrong
    return found


_RANGES: dict[str, tuple[Callable, Callable[[float], bool], str]] = {
    "temperature": (
        _number,
        lambda t: 0 <= t <= LIMIT,
        f"0 (greedy) or more, and at most {LIMIT:g}",
    ),
    "top_k": (integer, lambda k: k >= 0, "0 (all) or more"),
    "top_p": (_number, lambda p: 0 <= p <= 1, "from 0 to 1 (all)"),
    "min_p": (_number, lambda p: 0 <= p <= 1, "from 0 (all) to 1"),
    "seed": (
        integer,
        lambda s: -_SEEDS // 2 <= s < _SEEDS,
        "of 64 bits, -2**63..2**64-1, or None for a fresh one",
    ),
    "repetition_penalty": (
        _number,
        lambda r: 1 / LIMIT <= r <= LIMIT,
        f"positive, {1 / LIMIT:g} to {LIMIT:g}; 1 is none",
    ),
    "presence_penalty": (
        _number,
        lambda p: abs(p) <= LIMIT,
        f"a number from {-LIMIT:g} to {LIMIT:g}; 0 is none",
    ),
    "frequency_penalty": (
        _number,
        lambda p: abs(p) <= LIMIT,
        f"a number from {-LIMIT:g} to {LIMIT:g}; 0 is none",
    ),
    "min_new_tokens": (integer, lambda n: n >= 0, "0 or more"),
}

"""Prompts close to what people ask, composed of task forms and word lists.

A prompt is a function of a seed and its number alone. Forms and words are the
project's own (`data/task_forms.toml`, `data/task_words.toml`); passages to rewrite,
summarise or talk about are pieces of answers in the self-written text that comes with
it. No prompt of an evaluation is among them.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import tomllib
from importlib import resources

from m2r2_jax.files import read_json_lines

_SLOT = re.compile(r"\{(\w+?)(?:\.(\d))?\}|\{(\d+)\.\.(\d+)\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])(?!uni|use|eu|one)", re.IGNORECASE)
_SENTENCE = re.compile(r"[^.!?]+[.!?]+(?=\s|$)")
# Code, lists, talk about the talk itself, and what nobody should have to read.
_UNFIT = re.compile(
    r"[`*#|\\{}]|\d\. |SmolLM|\b(AI|I'm|I'd|I'll|assist)\b|(glad|happy) to|"
    r"sex|suicid|murder|rape|kill|porn|nazi|terroris"
)
# Rows of the text that passages come from: text added behind them changes no prompt.
_PASSAGE_ROWS = 8192
_PASSAGE_WORDS = range(25, 90)


def compose(seed: int, number: int, attempt: int = 0) -> str:
    """Prompt `number` of a seed.

    Args:
      seed: another one gives other prompts.
      number: 0 or more.
      attempt: of those that did not fit: see `fitting`.
    """
    # `random()` is the one method that is promised to stay the same over versions.
    draw = random.Random(f"{seed}/{number}/{attempt}").random
    kind = _pick(draw, _kinds())
    parts = [_pick(draw, _forms()[kind])]
    if kind in _forms()["open_kinds"]:
        if draw() < 0.3:
            parts.insert(0, "{situation}")
        parts += ["{constraint}"] * int(draw() * 3)
    text = _ARTICLE.sub(r"\1n ", _Filling(draw).fill(" ".join(parts)))
    if "{passage}" in text:
        text = text.replace("{passage}", _pick(draw, _passages()))
    return text[0].upper() + text[1:]


def fitting(seed: int, number: int, encode, limit: int) -> list[int]:
    """Ids of the first attempt at a prompt that has `limit` tokens at most.

    Raises:
      ValueError: the limit is too low for any of them.
    """
    for attempt in range(200):
        ids = encode(compose(seed, number, attempt))
        if len(ids) <= limit:
            return ids
    raise ValueError(
        f"max_prompt_tokens {limit} is too low for task prompts; 160 holds nearly all"
    )


class _Filling:
    """Fills the slots of one prompt, so that no item of a list comes twice.

    Attributes:
      draw: gives numbers from 0 to 1.
    """

    def __init__(self, draw):
        self.draw = draw
        self._used: dict[str, set[str]] = {}
        self._labelled: dict[str, str] = {}

    def fill(self, text: str) -> str:
        return _SLOT.sub(self._slot, text)

    def _slot(self, match: re.Match) -> str:
        name, label, low, high = match.groups()
        if name == "passage":
            return match[0]
        if low is not None:
            return str(int(low) + int(self.draw() * (int(high) - int(low) + 1)))
        if label is None:
            return self._item(name)
        if match[0] not in self._labelled:
            self._labelled[match[0]] = self._item(name)
        return self._labelled[match[0]]

    def _item(self, name: str) -> str:
        used = self._used.setdefault(name, set())
        items = _forms()[name]
        left = [item for item in items if item not in used] or items
        item = _pick(self.draw, left)
        used.add(item)
        return self.fill(item)


def _pick(draw, items):
    return items[int(draw() * len(items))]


@functools.cache
def _forms() -> dict[str, list[str]]:
    """All lists by name: forms, phrases and words."""
    data = resources.files("experiments") / "data"
    words = tomllib.loads((data / "task_words.toml").read_text(encoding="utf-8"))
    forms = tomllib.loads((data / "task_forms.toml").read_text(encoding="utf-8"))
    return forms | {name: " ".join(w.split()).split(", ") for name, w in words.items()}


@functools.cache
def _kinds() -> list[str]:
    return [name for name in _forms() if name[0].isupper()]


@functools.cache
def _passages() -> list[str]:
    """Beginnings of answers in plain prose."""
    path = resources.files("experiments") / "data" / "self_written.jsonl.xz"
    rows = itertools.islice(read_json_lines(path), _PASSAGE_ROWS)
    beginnings = (_beginning(row["response"].partition("\n")[0]) for row in rows)
    return [
        text
        for text in beginnings
        if len(text.split()) in _PASSAGE_WORDS and not _UNFIT.search(text)
    ]


def _beginning(text: str) -> str:
    """As many whole sentences as a passage may have, up to the first repetition."""
    kept: list[str] = []
    for sentence in _SENTENCE.findall(text):
        words = len(" ".join([*kept, sentence]).split())
        if words >= _PASSAGE_WORDS.stop or sentence.strip() in kept:
            break
        kept.append(sentence.strip())
    return " ".join(kept)

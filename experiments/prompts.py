"""Prompt suites: the embedded one, the published ones, or a file of the user's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A conversation's user turns.

    Attributes:
      id: unique within its suite.
      category: as published; "" where there is none.
      turns: the user's messages in order.
    """

    id: str
    category: str
    turns: tuple[str, ...]


def _turns(row: dict) -> Prompt:
    identity = row.get("question_id", row.get("id"))
    return Prompt(str(identity), row.get("category", ""), tuple(row["turns"]))


def _prompt(row: dict) -> Prompt:
    return Prompt(str(row["id"]), row.get("category", ""), (row["prompt"],))


def _instruction(row: dict) -> Prompt:
    given = row["instances"][0]["input"]
    text = row["instruction"] + (f"\n\n{given}" if given else "")
    return Prompt(str(row["id"]), row.get("motivation_app", ""), (text,))


def _skill(row: dict) -> Prompt:
    return Prompt(str(row["idx"]), row["Skill"], (row["Instruction"],))


# Suite -> how a row of its published file is read. None of them is part of the product.
SUITES: dict[str, Callable[[dict], Prompt]] = {
    "embedded": _turns,
    "mt_bench": _turns,
    "koala": _prompt,
    "self_instruct": _instruction,
    "wizardlm": _skill,
    "spec_bench": _turns,
}
_MARKS = {
    "turns": _turns,
    "prompt": _prompt,
    "instances": _instruction,
    "Instruction": _skill,
}


def load_prompts(name: str, data_dir: Path | None, limit: int | None) -> list[Prompt]:
    """Reads the first `limit` prompts of a suite, or all of them.

    Args:
      name: a key of `SUITES`, or the path of a .jsonl file in one of their formats.
      data_dir: where the published suites lie as NAME.jsonl.
      limit: None for all.

    Raises:
      FileNotFoundError: the suite's file is not there.
      ValueError: an unknown suite, a malformed row, or no prompt at all.
    """
    if name == "embedded":
        text = (
            resources.files("experiments") / "data" / "embedded_prompts.jsonl"
        ).read_text(encoding="utf-8")
        source = "the embedded suite"
    else:
        path = _file_of(name, data_dir)
        text, source = path.read_text(encoding="utf-8"), str(path)
    # Not `splitlines`: prompts may hold line separators that JSON leaves as they are.
    lines = [line for line in text.split("\n") if line.strip()][:limit]
    if not lines:
        raise ValueError(f"{source} gives no prompt with limit {limit}")
    return [_read(line, source, i, SUITES.get(name)) for i, line in enumerate(lines, 1)]


def _file_of(name: str, data_dir: Path | None) -> Path:
    if name.endswith(".jsonl"):
        path = Path(name)
        if not path.is_file():
            raise FileNotFoundError(f"no prompt file {name!r}")
        return path
    if name not in SUITES:
        raise ValueError(
            f"unknown prompt suite {name!r}; choose from {', '.join(SUITES)}, or name "
            "a .jsonl file"
        )
    if data_dir is None:
        raise ValueError(
            f"prompt suite {name!r} is not embedded: pass --data_dir=DIR with the "
            f"published prompts in DIR/{name}.jsonl, or use --prompts=embedded"
        )
    path = data_dir / f"{name}.jsonl"
    if not path.is_file():
        raise FileNotFoundError(
            f"{data_dir} has no {name}.jsonl; put the published prompts there, or use "
            "--prompts=embedded"
        )
    return path


def _read(line: str, source: str, number: int, reader) -> Prompt:
    try:
        row = json.loads(line)
        if reader is None:
            reader = next(read for mark, read in _MARKS.items() if mark in row)
        prompt = reader(row)
    except (ValueError, KeyError, TypeError, IndexError, StopIteration) as error:
        raise ValueError(
            f"{source}, line {number} is not a prompt ({error!r}); a row needs "
            'for example {"id": ..., "turns": [...]} or {"id": ..., "prompt": ...}'
        ) from error
    if not prompt.turns or not all(turn.strip() for turn in prompt.turns):
        raise ValueError(f"{source}, line {number} has an empty turn")
    return prompt

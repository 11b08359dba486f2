"""Files that are whole or absent, and JSON lines."""

from __future__ import annotations

import contextlib
import json
import lzma
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a place to write to, which becomes `path` at the end, or vanishes.

    A reader, or a crash, never sees half a file; folders above it are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Named by process, so that two runs writing one file do not share a place.
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replaces a text file at once."""
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")


def read_json_lines(path: Path) -> Iterator[dict]:
    """The rows of a .jsonl or .jsonl.xz file.

    Lines end at line feeds alone: JSON strings may hold other line separators.

    Raises:
      ValueError: a line that is not JSON, with its number.
    """
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}, line {number} is not JSON: {error}"
                ) from error
            yield row

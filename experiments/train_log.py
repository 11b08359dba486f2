"""What a training leaves to read: one line a step, and a curve."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from experiments.plots import save_figure
from m2r2_jax.files import write_text


class Log:
    """One JSON object a step; lines behind the step a run resumes from are dropped."""

    def __init__(self, path: Path, step: int):
        self.path = path
        kept = [row for row in read_log(path) if row["step"] <= step]
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))

    def add(self, row: dict) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_log(path: Path) -> Iterator[dict]:
    """The steps of a log; none if there is none."""
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # The line that was being written when the run died.
                return


def plot(folder: Path) -> None:
    """Loss and held-out acceptance over steps, as `curve.png`."""
    rows = list(read_log(folder / "log.jsonl"))
    evaluated = [row for row in rows if "acceptance" in row]

    def draw(figure) -> None:
        left, right = figure.subplots(1, 2)
        left.plot([row["step"] for row in rows], [row["loss"] for row in rows])
        left.set(xlabel="step", ylabel="loss", yscale="log")
        for position in range(len(evaluated[-1]["acceptance"])):
            right.plot(
                [row["step"] for row in evaluated],
                [row["acceptance"][position] for row in evaluated],
                marker=".",
                label=f"draft {position + 1}",
            )
        right.set(xlabel="step", ylabel="held-out acceptance given all before")
        right.legend()

    save_figure(folder / "curve.png", draw)

"""What a killed run has finished, so that the next one resumes there."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from experiments.prompts import Prompt
from experiments.report import Turn
from m2r2_jax import Answer
from m2r2_jax.files import write_text


class Progress:
    """Finished groups of prompts, one line each, read again when a run starts over.

    Lines of a run with another identity are dropped.
    """

    def __init__(self, path: Path, identity: dict):
        """Opens the file, keeping what an equal run has finished.

        Args:
          path: of the file; its folder is made.
          identity: what must be equal for finished groups to count.
        """
        self.path = path
        text = json.dumps(identity, sort_keys=True, default=str)
        self._identity = hashlib.sha256(text.encode()).hexdigest()
        self._groups: dict[str, list[dict]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_file():
            self._read()

    def _read(self) -> None:
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # The line that was being written when the run died.
                break
            if row["identity"] == self._identity:
                self._groups[row["group"]] = row["results"]
                kept.append(line + "\n")
        # Rewritten, so that what is appended next starts on a line of its own.
        write_text(self.path, "".join(kept))
        if kept:
            print(f"resuming after {len(kept)} finished prompts ({self.path})")

    def get(self, group: list[Prompt]) -> list[dict] | None:
        return self._groups.get(_group_id(group))

    def add(self, group: list[Prompt], results: list[dict]) -> None:
        row = {
            "identity": self._identity,
            "group": _group_id(group),
            "results": results,
        }
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self._groups[row["group"]] = results

    def results(self) -> list[dict]:
        return [result for results in self._groups.values() for result in results]

    def turns(self, group: list[Prompt]) -> list[Turn]:
        rows = [turn for result in self.get(group) for turn in result["turns"]]
        return [Turn(**{**row, "answer": Answer(**row["answer"])}) for row in rows]

    def finish(self) -> None:
        """Drops the file: a later run with the same settings measures afresh."""
        self.path.unlink()


def _group_id(group: list[Prompt]) -> str:
    return ",".join(prompt.id for prompt in group)

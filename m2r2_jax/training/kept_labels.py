"""Labels of text that were kept while it was written, as a store that grows by shards.

They are those of `labels.label`, but for the last token of a conversation, which nobody
learns from, and padding: both are zero here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from m2r2_jax.checkpoints.model import Model
from m2r2_jax.files import replacing, write_text
from m2r2_jax.training import packing
from m2r2_jax.training.exchanges import Conversation, Frame, Labels
from m2r2_jax.training.labels import PACKED_NAMES, label
from m2r2_jax.training.packing import Packed


class GrowingStore:
    """A label store that takes one shard of labelled conversations after another.

    A shard counts once all of its rows are on disk. `labels.LabelStore` reads it.

    Attributes:
      shards: for each shard in the store, by name, its first row.
    """

    def __init__(self, folder: Path, shape: tuple[int, int], about: dict):
        """Opens a store, or begins one.

        Args:
          folder: of the store.
          shape: T and D.
          about: what the labels depend on.

        Raises:
          ValueError: the folder holds labels of other settings.
        """
        self.folder = folder
        self._path = folder / "labels.json"
        self._meta = {"about": about, "shape": [0, *shape], "rows_done": 0}
        self._meta["shards"] = {}
        if self._path.is_file():
            found = json.loads(self._path.read_text())
            if found.get("about") != about or found["shape"][1:] != list(shape):
                raise ValueError(
                    f"{folder} holds labels made with other settings "
                    f"({found['about']}, asked for {about}); choose another --out, or "
                    "remove it"
                )
            self._meta = found
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def shards(self) -> dict[str, int]:
        return self._meta["shards"]

    def add(self, name: str, packed: Packed, labels: Labels) -> None:
        """Adds the rows of a shard; one of this number, and those behind it, give way.

        Args:
          name: begins with the shard's number.
          packed: its rows, `n` of them.
          labels: `[n, T, D]` and `[n, T]`.
        """
        number = name.partition("-")[0]
        kept = {k: v for k, v in self.shards.items() if k.partition("-")[0] < number}
        given_way = [first for other, first in self.shards.items() if other not in kept]
        first = min(given_way, default=self._meta["rows_done"])
        for file, rows in (
            ("states.bf16", labels.states.astype(ml_dtypes.bfloat16)),
            ("argmax.int32", labels.argmax.astype(np.int32)),
        ):
            _overwrite(self.folder / file, first, rows)
        for field in PACKED_NAMES:
            path, rows = self.folder / f"{field}.npy", getattr(packed, field)
            if first:
                rows = np.concatenate([np.load(path)[:first], rows])
            with replacing(path) as aside, open(aside, "wb") as opened:
                np.save(opened, rows)
        end = first + len(packed)
        self._meta["shape"][0] = self._meta["rows_done"] = end
        self._meta["shards"] = {**kept, name: first}
        write_text(self._path, json.dumps(self._meta))


def _overwrite(path: Path, first: int, rows: np.ndarray) -> None:
    """Puts rows into a file of equal rows from `first` on, and ends it there."""
    path.touch()
    with open(path, "r+b") as file:
        file.truncate(first * rows[:1].nbytes)
        file.seek(0, 2)
        file.write(rows.tobytes())


def pack_labelled(
    model: Model, frame: Frame, written: Sequence[Conversation], length: int, seed: int
) -> tuple[Packed, Labels]:
    """Conversations with labels, packed, and their labels in the same places.

    Args:
      model: that wrote them.
      frame: its chat frame.
      written: from `writing.write_all(..., keep=True)`.
      length: T.
      seed: of the packing.
    """
    rows = packing.arrange(written, frame, length, seed)
    shape, opening = (len(rows), length), len(frame.opening)
    states = np.zeros((*shape, model.config.width), ml_dtypes.bfloat16)
    argmax = np.zeros(shape, np.int32)
    ahead = _opening_labels(model, frame)
    states[:, :opening], argmax[:, :opening] = ahead.states, ahead.argmax
    for row, conversations in enumerate(rows):
        at = opening
        for conversation in conversations:
            found = conversation.labels
            end = min(at + len(found.argmax), length)
            states[row, at:end] = found.states[: end - at]
            argmax[row, at:end] = found.argmax[: end - at]
            at = end + 1
    return packing.fill(rows, frame, length), Labels(states, argmax)


def _opening_labels(model: Model, frame: Frame) -> Labels:
    """Labels of the chat template's opening, which all rows begin with."""
    tokens = np.asarray(frame.opening, np.int32)[None]
    position = np.arange(tokens.shape[1], dtype=np.int32)[None]
    segment = np.full(tokens.shape, packing.OPENING, np.int16)
    found = label(model.config, model.params, tokens, segment, position)
    states, argmax = jax.device_get(found)
    return Labels(states[0], argmax[0])

"""Teacher states: what the frozen model thinks at each token, computed once.

Per token the normalised final hidden state (bf16) and the arg-max id are stored in
memory-mapped files, never logits: a head of any size can be applied to a state later.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from m2r2_jax.checkpoints.model import Model
from m2r2_jax.files import write_text
from m2r2_jax.models import layers, transformer
from m2r2_jax.models.config import Decoder, ModelConfig
from m2r2_jax.training.losses import Batch
from m2r2_jax.training.packing import OPENING, Packed

PACKED_NAMES = tuple(field.name for field in dataclasses.fields(Packed))


def packed_rows(config: ModelConfig, segment_BT, position_BT) -> transformer.Rows:
    """Where packed rows stand and what they see: the opening, and their own segment."""
    T = segment_BT.shape[1]
    same_BTT = segment_BT[:, :, None] == segment_BT[:, None, :]
    sees_BTT = same_BTT | (segment_BT[:, None, :] == OPENING)
    causal_TT = jnp.tril(jnp.ones((T, T), jnp.bool_))
    sees_BTT &= causal_TT
    return transformer.rows_at(config, position_BT, position_BT, sees_BTT)


@functools.partial(jax.jit, static_argnames=("config",))
def label(
    config: ModelConfig, params: dict, tokens_BT, segment_BT, position_BT
) -> tuple[jax.Array, jax.Array]:
    """Normalised final states (bf16 `[B, T, D]`) and arg-max ids (`[B, T]`)."""
    rows = packed_rows(config, segment_BT, position_BT)
    x_BTD = transformer.embed(config, params, tokens_BT)
    decoder = Decoder(config)
    x_BTD, _ = transformer.run_layers(
        decoder, params["blocks"], x_BTD, rows, None, 0, config.num_layers
    )
    state_BTD = transformer.final_norm(config, params, x_BTD)
    argmax_BT = layers.argmax(transformer.unembed(decoder, params, state_BTD))
    return state_BTD.astype(jnp.bfloat16), argmax_BT.astype(jnp.int32)


class LabelStore:
    """Packed rows and their labels in one folder, memory-mapped.

    Attributes:
      packed: the rows, `N` of `T` tokens.
      states: bf16 `[N, T, D]`.
      argmax: `int32[N, T]`.
      rows_done: rows that are labelled; all of them once the labelling has ended.
    """

    def __init__(self, folder: Path, mode: str = "r"):
        """Opens a store.

        Raises:
          FileNotFoundError: there is none.
        """
        self.folder = folder
        if not (folder / "labels.json").is_file():
            raise FileNotFoundError(
                f"no labels at {str(folder)!r}; make them with --exp=label"
            )
        self.meta = json.loads((folder / "labels.json").read_text())
        rows, length, width = self.meta["shape"]
        # Longer than `rows` where a store that grows was interrupted.
        self.packed = Packed(
            *(
                np.load(folder / f"{name}.npy", mmap_mode="r")[:rows]
                for name in PACKED_NAMES
            )
        )
        self.states = np.memmap(
            folder / "states.bf16",
            ml_dtypes.bfloat16,
            mode,
            shape=(rows, length, width),
        )
        self.argmax = np.memmap(
            folder / "argmax.int32", np.int32, mode, shape=(rows, length)
        )

    @classmethod
    def create(
        cls, folder: Path, packed: Packed, width: int, about: dict
    ) -> LabelStore:
        """Opens the store of these rows for writing, keeping what is labelled already.

        Args:
          folder: of the store.
          packed: the rows.
          width: D.
          about: what must be equal for labels of an earlier run to count.
        """
        shape = (*packed.tokens.shape, width)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "labels.json"
        known = json.loads(path.read_text()) if path.is_file() else {}
        if known.get("about") != about or known.get("shape") != list(shape):
            path.unlink(missing_ok=True)
            for name in PACKED_NAMES:
                np.save(folder / f"{name}.npy", getattr(packed, name))
            for name, itemsize, size in (
                ("states.bf16", 2, np.prod(shape)),
                ("argmax.int32", 4, np.prod(shape[:2])),
            ):
                with open(folder / name, "wb") as file:
                    file.truncate(int(itemsize * size))
            meta = {"about": about, "shape": shape, "rows_done": 0}
            write_text(path, json.dumps(meta))
        return cls(folder, "r+")

    @property
    def rows_done(self) -> int:
        return self.meta["rows_done"]

    def check_ids(self, vocab_size: int) -> None:
        """Raises ValueError where a row or its labels have ids outside a vocabulary."""
        for ids in (self.packed.tokens, self.argmax[: self.rows_done]):
            wrong = np.argwhere((ids < 0) | (ids >= vocab_size))
            if len(wrong):
                row, position = wrong[0]
                raise ValueError(
                    f"{self.folder}, row {row} has id {ids[row, position]}; the "
                    f"vocabulary has the ids 0..{vocab_size - 1}: the labels are of "
                    "another model"
                )

    def add(self, first: int, states: np.ndarray, argmax: np.ndarray) -> None:
        """Stores labels of the rows from `first` on; they count once on disk."""
        end = first + len(states)
        self.states[first:end], self.argmax[first:end] = states, argmax
        self.states.flush()
        self.argmax.flush()
        self.meta["rows_done"] = end
        write_text(self.folder / "labels.json", json.dumps(self.meta))


def label_rows(model: Model, store: LabelStore, batch: int) -> Iterator[int]:
    """Labels the rows that are missing, `batch` at a time; yields the rows done.

    Raises:
      ValueError: a row has ids outside the model's vocabulary.
    """
    store.check_ids(model.config.vocab_size)
    packed, total = store.packed, len(store.packed)
    for first in range(store.rows_done, total, batch):
        # The last batch is filled up, so that there is one shape.
        index = np.minimum(np.arange(first, first + batch), total - 1)
        arrays = (packed.tokens[index], packed.segment[index], packed.position[index])
        placed = model.place(arrays)
        states, argmax = jax.device_get(label(model.config, model.params, *placed))
        size = min(batch, total - first)
        store.add(first, states[:size], argmax[:size])
        yield store.rows_done


def place_batch(model: Model, store: LabelStore, index: np.ndarray) -> Batch:
    """Rows of a store on the device, or over the mesh."""
    packed = store.packed
    batch = Batch(
        packed.tokens[index],
        packed.segment[index],
        packed.position[index],
        packed.trained[index],
        store.states[index],
        store.argmax[index],
    )
    return model.place(batch)

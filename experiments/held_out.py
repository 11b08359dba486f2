"""Held-out text for trainings: the model's greedy answers to the embedded prompts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from experiments.models import batch_identity
from experiments.prompts import load_prompts
from m2r2_jax import Model
from m2r2_jax.training import packing, writing
from m2r2_jax.training.exchanges import chat_frame
from m2r2_jax.training.labels import LabelStore, label_rows, place_batch
from m2r2_jax.training.losses import Batch
from m2r2_jax.training.writing_state import WritingConfig

_ANSWER_TOKENS, _ROWS = 128, 40
_NEVER = 10**6
_BATCH = 4


def held_out_batches(model: Model, folder: Path) -> list[Batch]:
    """Labelled answers to the embedded prompts' first turns.

    They are written and labelled once and kept in `folder`: settings and trainings are
    compared on the same tokens, and on those of the answers alone.
    """
    if not _complete(model, folder):
        packed = _write(model)
        about = {**batch_identity(model), "tokens": packing.fingerprint(packed)}
        store = LabelStore.create(folder, packed, model.config.width, about)
        for _ in label_rows(model, store, _BATCH):
            pass
    store = LabelStore(folder)
    # Drafts are never made in a prompt, which is more than a third of the tokens here.
    answers = packing.in_answers(store.packed)
    store.packed = dataclasses.replace(store.packed, trained=answers)
    rows = len(store.packed)
    pieces = np.array_split(np.arange(rows), -(-rows // _BATCH))
    return [place_batch(model, store, index) for index in pieces]


def _complete(model: Model, folder: Path) -> bool:
    """Whether the folder holds all labels, and those of this model in its dtype."""
    if not (folder / "labels.json").is_file():
        return False
    store = LabelStore(folder)
    same = batch_identity(model).items() <= store.meta["about"].items()
    return same and store.rows_done == len(store.packed)


def _write(model: Model) -> packing.Packed:
    frame = chat_frame(model.tokenizer)
    around = len(frame.opening) + len(frame.bridge) + _ANSWER_TOKENS
    prompts = load_prompts("embedded", None, None)
    encoded = [model.tokenizer.encode(prompt.turns[0]) for prompt in prompts]
    turns = [ids[: model.config.context_length - around] for ids in encoded]
    config = WritingConfig(
        rows=_ROWS,
        max_prompt_tokens=max(map(len, turns)),
        max_answer_tokens=_ANSWER_TOKENS,
        sampled_every=_NEVER,
    )
    # Number 0 would be sampled, being the first of so many.
    written = writing.write_all(model, frame, config, len(turns), 1, turns)
    return packing.pack(written, frame, 512, seed=0)

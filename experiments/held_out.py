"""Held-out text for trainings: the model's greedy answers to the embedded prompts."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from experiments.prompts import load_prompts
from m2r2_jax import Model, data, writing
from m2r2_jax.labels import LabelStore, label_rows
from m2r2_jax.losses import Batch

_ANSWER_TOKENS, _ROWS = 128, 40
_NEVER = 10**6
_BATCH = 4


def held_out_batches(model: Model, folder: Path) -> list[Batch]:
    """Labelled answers to the embedded prompts' first turns.

    They are written and labelled once and kept in `folder`: settings and trainings
    are compared on the same tokens.
    """
    if not (folder / "labels.json").is_file():
        packed = _write(model)
        about = {"model": model.config.name, "tokens": data.fingerprint(packed)}
        store = LabelStore.create(folder, packed, model.config.width, about)
        for _ in label_rows(model, store, _BATCH):
            pass
    store = LabelStore(folder)
    rows = len(store.packed)
    pieces = np.array_split(np.arange(rows), -(-rows // _BATCH))
    return [_batch(store, index) for index in pieces]


def _write(model: Model) -> data.Packed:
    frame = writing.chat_frame(model.tokenizer)
    around = len(frame.opening) + len(frame.bridge) + _ANSWER_TOKENS
    prompts = load_prompts("embedded", None, None)
    encoded = [model.tokenizer.encode(prompt.turns[0]) for prompt in prompts]
    turns = [ids[: model.config.context_length - around] for ids in encoded]
    config = writing.WritingConfig(
        rows=_ROWS,
        max_prompt_tokens=max(map(len, turns)),
        max_answer_tokens=_ANSWER_TOKENS,
        sampled_every=_NEVER,
    )
    state = writing.start(model, frame, config, len(turns), prompts=turns)
    eos = jnp.asarray(sorted(model.tokenizer.eos_ids), jnp.int32)
    while not bool(state.done):
        state = writing.write(
            model.config,
            model.params,
            frame,
            config,
            eos,
            jnp.int32(1),  # Number 0 would be sampled, being the first of so many.
            state,
            jnp.int32(64),
        )
    return data.pack(writing.collect(frame, state), frame, 512, seed=0)


def _batch(store: LabelStore, index: np.ndarray) -> Batch:
    packed = store.packed
    arrays = (packed.tokens, packed.segment, packed.position, packed.trained)
    arrays = (*arrays, store.states, store.argmax)
    return Batch(*(jnp.asarray(array[index]) for array in arrays))

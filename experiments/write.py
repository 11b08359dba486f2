"""`--exp=write`: the model writes its own training text.

Conversations are written in shards. A shard is a function of the model, the settings
and its number alone, and its file appears at once and whole: a run that was killed goes
on with the first shard that is missing, and the text is bitwise the same.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from tqdm.auto import tqdm

from experiments.report import write_text
from experiments.suite import Settings
from m2r2_jax import load, writing
from m2r2_jax.sharding import make_mesh
from m2r2_jax.writing import Conversation, Frame, WritingConfig

_STEPS_PER_CALL = 32  # How often the progress bar moves.


def run(settings: Settings) -> dict:
    """Writes `--limit` conversations into `shards/` of the output folder."""
    count, per_shard = settings.limit, 2048
    config = WritingConfig(seed=settings.seed)
    model = load(
        settings.model,
        dtype=jnp.bfloat16,
        stream_dtype=jnp.float32,
        mesh=make_mesh(settings.mesh) if settings.mesh != "data:1" else None,
    )
    frame = writing.chat_frame(model.tokenizer)
    folder = settings.out / "shards"
    folder.mkdir(parents=True, exist_ok=True)
    started, tokens = time.perf_counter(), 0
    bar = tqdm(total=count, unit="conversation", disable=None)
    for first in range(0, count, per_shard):
        size = min(per_shard, count - first)
        path = folder / f"{first:07d}.jsonl"
        if not path.is_file():
            written = write_shard(model, frame, config, size, first, bar)
            tokens += sum(len(c.prompt_ids) + len(c.answer_ids) for c in written)
            write_text(path, "".join(map(_line(model.tokenizer, frame), written)))
            rate = tokens / (time.perf_counter() - started)
            print(f"{path}: {tokens} tokens in this run, {rate:.0f} tokens/s", flush=True)
        bar.update(first + size - bar.n)
    bar.close()
    return {"experiment": "write", "tokens": tokens}


def write_shard(
    model, frame: Frame, config: WritingConfig, count: int, first: int, bar
) -> list[Conversation]:
    """Conversations `first` .. `first + count - 1`."""
    state = writing.start(model, frame, config, count, first)
    eos = jnp.asarray(sorted(model.tokenizer.eos_ids), jnp.int32)
    while not bool(state.done):
        state = writing.write(
            model.config,
            model.params,
            frame,
            config,
            eos,
            jnp.int32(first),
            state,
            jnp.int32(_STEPS_PER_CALL),
        )
        ended = int(state.next_index) - int(jnp.sum(state.index < count))
        bar.update(first + ended - bar.n)
        bar.set_postfix(tokens=int(state.tokens))
    return writing.collect(frame, state)


def _line(tokenizer, frame: Frame):
    """How a conversation is stored: text, and ids where encoding would not meet them."""

    def line(conversation: Conversation) -> str:
        row = {"finished": conversation.finished}
        for name, ids in (
            ("prompt", conversation.prompt_ids),
            ("response", conversation.answer_ids),
        ):
            row[name] = tokenizer.decode(ids)
            end = [frame.bridge[0]] if name == "response" and row["finished"] else []
            if [*tokenizer.encode(row[name]), *end] != ids:
                row[f"{name}_ids"] = ids
        return json.dumps(row, ensure_ascii=False) + "\n"

    return line

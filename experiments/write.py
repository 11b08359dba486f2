"""`--exp=write`: the model writes its own training text.

Conversations are written in shards. A shard is a function of the model, the settings
and its number alone, and its file appears at once and whole: a run that was killed goes
on with the first shard that is missing, and the text is bitwise the same.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import jax.numpy as jnp

from experiments.bars import progress_bar
from experiments.models import batch_identity, load_for_batches
from experiments.options import read_options
from experiments.prompts import load_prompts
from experiments.suite import Settings
from experiments.task_prompts import fitting
from m2r2_jax import Model
from m2r2_jax.files import write_text
from m2r2_jax.training import packing, writing
from m2r2_jax.training.exchanges import chat_frame
from m2r2_jax.training.writing import WritingConfig, WritingState


@dataclasses.dataclass(frozen=True)
class WriteOptions:
    """Options of `--exp=write`; see `WritingConfig` for those not told here.

    Attributes:
      first: number of the first conversation, to go on behind text written before.
      shard: conversations a file.
      prompts: `own`: the model writes them; `tasks`: see `task_prompts`.
      dataset: whether a TFDS dataset is built of the shards at the end.
    """

    first: int = 0
    shard: int = 2048
    rows: int = WritingConfig.rows
    max_prompt_tokens: int = WritingConfig.max_prompt_tokens
    max_answer_tokens: int = WritingConfig.max_answer_tokens
    sampled_every: int = WritingConfig.sampled_every
    answer_temperature: float = WritingConfig.answer_temperature
    prompts: str = "own"
    dataset: bool = True

    def __post_init__(self):
        if self.prompts not in ("own", "tasks"):
            raise ValueError(f"--set prompts={self.prompts}: choose own or tasks")


def run(settings: Settings) -> dict:
    """Writes conversations into `shards/` of the output folder.

    Without `--data` the model writes prompts too, `--limit` of them, or answers as many
    task prompts; else it answers those of a .jsonl file.
    """
    options = read_options(WriteOptions, settings.overrides)
    named = dataclasses.asdict(options)
    own = ("first", "shard", "prompts", "dataset")
    start, shard, source, dataset = map(named.pop, own)
    config = WritingConfig(seed=settings.seed, **named)
    model = load_for_batches(settings)
    frame = chat_frame(model.tokenizer)
    if settings.data:
        source = str(settings.data)
        prompts = _prompts_of_file(settings, model, config)
    elif source == "tasks":
        prompts = _task_prompts(settings, model, config, start)
    else:
        prompts = []
    count = len(prompts) if settings.data else settings.limit
    folder = settings.out / "shards"
    folder.mkdir(parents=True, exist_ok=True)
    identity = {**batch_identity(model), **dataclasses.asdict(config)}
    _check_identity(settings, {**identity, "prompts": source})
    started, tokens = time.perf_counter(), 0
    bar = progress_bar(count, "conversation")
    for done in range(0, count, shard):
        first, size = start + done, min(shard, count - done)
        path = folder / f"{first:07d}-{size}.jsonl"
        if path.is_file():
            bar.update(size)
            continue
        given = prompts[done : done + size]
        watch = _watcher(bar, size)
        written = writing.write_all(
            model, frame, config, size, first, given, watch=watch
        )
        tokens += sum(len(c.prompt_ids) + len(c.answer_ids) for c in written)
        _store(path, [packing.as_row(c, model.tokenizer, frame) for c in written])
        rate = tokens / (time.perf_counter() - started)
        bar.write(f"{path}: {tokens} tokens in this run, {rate:.0f} tokens/s")
    bar.close()
    if dataset:
        from m2r2_jax.training.dataset import build

        print(f"dataset: {build(folder, settings.out / 'dataset')}")
    return {"experiment": "write", "conversations": count, "tokens": tokens}


def _store(path: Path, rows: list[dict]) -> None:
    """Writes a shard; one that began likewise and was shorter gives way to it."""
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_text(path, "".join(lines))
    number = path.name.partition("-")[0]
    for other in path.parent.glob(f"{number}-*.jsonl"):
        if other != path:
            other.unlink()


def _task_prompts(
    settings: Settings, model: Model, config: WritingConfig, first: int
) -> list[list[int]]:
    """User turns composed of task forms, by the conversations' numbers."""
    encode, limit = model.tokenizer.encode, config.max_prompt_tokens
    numbers = range(first, first + settings.limit)
    return [fitting(config.seed, number, encode, limit) for number in numbers]


def _prompts_of_file(
    settings: Settings, model: Model, config: WritingConfig
) -> list[list[int]]:
    """User turns to answer, those that are too long left out with a word."""
    loaded = load_prompts(str(settings.data), None, settings.limit)
    encoded = [model.tokenizer.encode(prompt.turns[0]) for prompt in loaded]
    kept = [ids for ids in encoded if 0 < len(ids) <= config.max_prompt_tokens]
    if left := len(encoded) - len(kept):
        print(f"{left} prompts have over {config.max_prompt_tokens} tokens: left out")
    return kept


def _check_identity(settings: Settings, identity: dict) -> None:
    """Refuses to mix shards of different settings in one folder."""
    path = settings.out / "write.json"
    if path.is_file() and (found := json.loads(path.read_text())) != identity:
        raise ValueError(
            f"{settings.out} holds text written with other settings ({found}, asked "
            f"for {identity}); choose another --out, or remove it"
        )
    write_text(path, json.dumps(identity))


def _watcher(bar, count: int):
    """Moves the bar by the conversations of a shard that have ended."""
    shown = 0

    def watch(state: WritingState) -> None:
        nonlocal shown
        ended = int(state.next_index) - int(jnp.sum(state.index < count))
        bar.update(ended - shown)
        bar.set_postfix(tokens=int(state.tokens))
        shown = ended

    return watch

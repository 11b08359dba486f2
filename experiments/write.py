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
import numpy as np

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
from m2r2_jax.training.kept_labels import GrowingStore, pack_labelled
from m2r2_jax.training.writing_state import WritingConfig, WritingState


@dataclasses.dataclass(frozen=True)
class WriteOptions:
    """Options of `--exp=write`; see `WritingConfig` for those not told here.

    Attributes:
      first: number of the first conversation, to go on behind text written before.
      shard: conversations a file.
      prompts: `own`: the model writes them; `tasks`: see `task_prompts`.
      labels: whether the teacher's labels are kept too, in `labels/`: what
        `--exp=label` computes, packed shard by shard.
      row_length: tokens a packed row of them.
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
    labels: bool = False
    row_length: int = 512
    dataset: bool = True

    def __post_init__(self):
        if self.prompts not in ("own", "tasks"):
            raise ValueError(f"--set prompts={self.prompts}: choose own or tasks")

    def config(self, seed: int) -> WritingConfig:
        """What the text depends on besides the model and the prompts."""
        names = {field.name for field in dataclasses.fields(WritingConfig)} - {"seed"}
        return WritingConfig(seed=seed, **{name: getattr(self, name) for name in names})


def run(settings: Settings) -> dict:
    """Writes conversations into `shards/` of the output folder.

    Without `--data` the model writes prompts too, `--limit` of them, or answers as many
    task prompts; else it answers those of a .jsonl file.
    """
    options = read_options(WriteOptions, settings.overrides)
    writer = Writer(load_for_batches(settings), options, settings)
    prompts = writer.prompts()
    count = len(prompts) if settings.data else settings.limit
    bar = progress_bar(count, "conversation")
    for done in range(0, count, options.shard):
        first, size = options.first + done, min(options.shard, count - done)
        writer.write(first, size, prompts[done : done + size], bar)
    bar.close()
    if options.labels:
        writer.rank_tokens()
    if options.dataset:
        from m2r2_jax.training.dataset import build

        print(f"dataset: {build(writer.folder, settings.out / 'dataset')}")
    return {"experiment": "write", "conversations": count, "tokens": writer.tokens}


class Writer:
    """Writes shards into one folder.

    Attributes:
      folder: of the shards.
      tokens: written in this run.
    """

    def __init__(self, model: Model, options: WriteOptions, settings: Settings):
        self.model, self.options, self.settings = model, options, settings
        self.frame = chat_frame(model.tokenizer)
        self.config = options.config(settings.seed)
        self.folder = settings.out / "shards"
        self.folder.mkdir(parents=True, exist_ok=True)
        identity = {**batch_identity(model), **dataclasses.asdict(self.config)}
        identity["prompts"] = str(settings.data or options.prompts)
        _check_identity(settings, identity)
        self.labels = None
        if options.labels:
            shape = (options.row_length, model.config.width)
            self.labels = GrowingStore(settings.out / "labels", shape, identity)
        self.started, self.tokens = time.perf_counter(), 0

    def prompts(self) -> list[list[int]]:
        """User turns to answer, or none where the model writes them."""
        if self.settings.data:
            return _prompts_of_file(self.settings, self.model, self.config)
        if self.options.prompts == "own":
            return []
        encode, limit = self.model.tokenizer.encode, self.config.max_prompt_tokens
        first = self.options.first
        numbers = range(first, first + self.settings.limit)
        return [fitting(self.config.seed, n, encode, limit) for n in numbers]

    def write(self, first: int, size: int, prompts: list[list[int]], bar) -> None:
        """Writes the shard of conversations `first` .. `first + size - 1`."""
        path = self.folder / f"{first:07d}-{size}.jsonl"
        if path.is_file():
            self._check_labelled(path)
            bar.update(size)
            return
        written = writing.write_all(
            self.model,
            self.frame,
            self.config,
            size,
            first,
            prompts,
            keep=self.labels is not None,
            watch=_watcher(bar, size),
        )
        if self.labels is not None:
            length, seed = self.options.row_length, self.settings.seed
            packed = pack_labelled(self.model, self.frame, written, length, seed)
            self.labels.add(path.stem, *packed)
        tokenizer = self.model.tokenizer
        _store(path, [packing.as_row(c, tokenizer, self.frame) for c in written])
        self.tokens += sum(len(c.prompt_ids) + len(c.answer_ids) for c in written)
        rate = self.tokens / (time.perf_counter() - self.started)
        bar.write(f"{path}: {self.tokens} tokens in this run, {rate:.0f} tokens/s")

    def _check_labelled(self, path: Path) -> None:
        if self.labels is not None and path.stem not in self.labels.shards:
            raise ValueError(
                f"{path} was written without labels; label it with --exp=label "
                f"--data={self.folder}, or remove it to have it written again"
            )

    def rank_tokens(self) -> None:
        """Leaves the order of the draft head's ids beside the labels."""
        written = packing.read_conversations(
            self.folder, self.model.tokenizer, self.frame
        )
        ranking = packing.rank_tokens(written, self.model.config.vocab_size)
        np.save(self.labels.folder / "ranking.npy", ranking)


def _store(path: Path, rows: list[dict]) -> None:
    """Writes a shard; one that began likewise and was shorter gives way to it."""
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_text(path, "".join(lines))
    number = path.name.partition("-")[0]
    for other in path.parent.glob(f"{number}-*.jsonl"):
        if other != path:
            other.unlink()


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

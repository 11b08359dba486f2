"""The registry of experiments: what each measures, and the settings they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

# Known here so that a wrong name is refused before anything heavy is imported; a test
# holds them against the library's own list.
METHOD_NAMES = (
    "autoregressive",
    "prompt_lookup",
    "m2r2",
    "early_exit",
    "random_draft",
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run was asked for; see `python -m experiments.run --help`."""

    command: str
    prompts: str
    data_dir: Path | None
    data: Path | None
    limit: int | None
    max_new_tokens: int
    methods: tuple[str, ...]
    model: str | None
    mesh: str
    out: Path
    seed: int
    overrides: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A named experiment.

    Attributes:
      summary: one line for `--help`.
      run: takes the settings, writes and returns the record.
      default_methods: what runs when `--methods` is not given.
      default_limit: how many prompts or conversations when `--limit` is not given;
        None is all.
    """

    summary: str
    run: Callable[[Settings], dict]
    default_methods: tuple[str, ...] = ()
    default_limit: int | None = None


def _mtbench(settings: Settings) -> dict:
    from experiments.decoding_speed import measure

    return measure("mtbench", settings)


def _write(settings: Settings) -> dict:
    from experiments.write import run

    return run(settings)


def _label(settings: Settings) -> dict:
    from experiments.label import run

    return run(settings)


def _train(settings: Settings) -> dict:
    from experiments.train import run

    return run(settings)


def _choose(settings: Settings) -> dict:
    from experiments.choose import run

    return run(settings)


def _sweep(settings: Settings) -> dict:
    from experiments.sweep import run

    return run(settings)


EXPERIMENTS = {
    "mtbench": Experiment(
        "plain against draft-verify decoding on two-turn chat prompts",
        _mtbench,
        # Untrained accelerators only cost time: m2r2 joins when they are trained.
        ("autoregressive", "prompt_lookup"),
        8,
    ),
    "write": Experiment("the model writes its own training text", _write, (), 2048),
    "label": Experiment("the teacher's states of a text, stored once", _label),
    "train": Experiment("train accelerators on labelled text", _train),
    "choose": Experiment(
        "draft length and confidence stop, measured and stored", _choose, (), 8
    ),
    "sweep": Experiment("exit depth, rank and head size, in one table", _sweep),
}

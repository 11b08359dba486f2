"""The registry of experiments: what each measures, and the settings they share."""

from __future__ import annotations

import dataclasses
import importlib
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


def _run_of(module: str) -> Callable[[Settings], dict]:
    """`run` of a module, imported when it is called and not before."""
    return lambda settings: importlib.import_module(module).run(settings)


EXPERIMENTS = {
    "mtbench": Experiment(
        "plain against draft-verify decoding on two-turn chat prompts",
        _mtbench,
        ("autoregressive", "prompt_lookup", "m2r2"),
        8,
    ),
    "write": Experiment(
        "the model writes its own training text", _run_of("experiments.write"), (), 2048
    ),
    "label": Experiment(
        "the teacher's states of a text, stored once", _run_of("experiments.label")
    ),
    "train": Experiment(
        "train accelerators on labelled text", _run_of("experiments.train")
    ),
    "choose": Experiment(
        "draft length and confidence stop, measured and stored",
        _run_of("experiments.choose"),
        (),
        8,
    ),
    "batches": Experiment(
        "speed and tau as more rows decode together",
        _run_of("experiments.batches"),
        ("autoregressive", "prompt_lookup", "m2r2"),
        16,
    ),
    "correctness": Experiment(
        "every drafter against plain decoding: exact, one row, bf16",
        _run_of("experiments.correctness"),
        METHOD_NAMES,
        8,
    ),
    "profile": Experiment(
        "where a step and a round spend their time here",
        _run_of("experiments.profile"),
    ),
    "tpu_compile": Experiment(
        "kernels and programs through the TPU compiler, without a TPU",
        _run_of("experiments.tpu_compile"),
    ),
    "kernels": Experiment(
        "the kernels' times on the accelerator here",
        _run_of("experiments.kernels"),
    ),
    "sweep": Experiment(
        "exit depth, rank and head size, in one table", _run_of("experiments.sweep")
    ),
}

"""The registry of experiments: what each measures, and the settings they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

# Known here so that a wrong name is refused before anything heavy is imported; a test
# holds them against the library's own list.
METHOD_NAMES = ("autoregressive", "prompt_lookup", "m2r2", "random_draft")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run was asked for; see `python -m experiments.run --help`."""

    command: str
    prompts: str
    data_dir: Path | None
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
      default_methods: what runs when `--methods` is not given.
      run: takes the settings, writes and returns the record.
    """

    summary: str
    default_methods: tuple[str, ...]
    run: Callable[[Settings], dict]


def _mtbench(settings: Settings) -> dict:
    from experiments.decoding_speed import measure

    return measure("mtbench", settings)


def _write(settings: Settings) -> dict:
    from experiments.write import run

    return run(settings)


EXPERIMENTS = {
    "mtbench": Experiment(
        "plain against draft-verify decoding on two-turn chat prompts",
        # Untrained accelerators only cost time: m2r2 joins when they are trained.
        ("autoregressive", "prompt_lookup"),
        _mtbench,
    ),
    "write": Experiment("the model writes its own training text", (), _write),
}

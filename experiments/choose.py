"""`--exp=choose`: draft length and confidence stop of accelerators, by measurement.

Settings take turns on the embedded prompts, never on published ones, and the fastest is
stored in the accelerators' file, where every later run finds it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from experiments import metrics
from experiments.bars import progress_bar
from experiments.decoding_speed import Runner
from experiments.options import read_options
from experiments.prompts import load_prompts
from experiments.suite import Settings
from m2r2_jax import Answer, build_method, load
from m2r2_jax.checkpoints.accelerators import (
    DraftSettings,
    load_accelerators,
    save_accelerators,
)


@dataclasses.dataclass(frozen=True)
class ChooseOptions:
    """Options of `--exp=choose`: every length with every confidence.

    Attributes:
      lengths: drafts a round at most.
      percents: confidences below which drafting stops, in percent.
    """

    lengths: tuple[int, ...] = (1, 2, 3, 4)
    percents: tuple[int, ...] = (20, 40)

    def grid(self) -> list[DraftSettings]:
        return [DraftSettings(k, c / 100) for k in self.lengths for c in self.percents]


def run(settings: Settings) -> dict:
    """Measures the grid and stores the fastest in `--data`, a file of accelerators."""
    options = read_options(ChooseOptions, settings.overrides)
    path = settings.data or Path("results/train/accelerators.safetensors")
    model = load(settings.model)
    trained = load_accelerators(path, model.config)
    prompts = load_prompts("embedded", None, settings.limit)
    methods = [build_method("autoregressive", model)]
    by_name = {}
    for drafting in options.grid():
        given = dataclasses.asdict(drafting)
        method = build_method("m2r2", model, accelerators=str(path), **given)
        name = f"length {drafting.length}, confidence {drafting.min_confidence:.2f}"
        by_name[name] = drafting
        methods.append(dataclasses.replace(method, name=name))
    runner = Runner(model, methods, settings, temperature=0.0, exact=False)
    bar = progress_bar(len(prompts) * len(methods), "answer set")
    results = [
        result
        for index, prompt in enumerate(prompts)
        for result in runner.run_group([prompt], index, bar)
    ]
    bar.close()
    speeds = {method.name: _speed(method.name, results) for method in methods}
    plain = speeds.pop("autoregressive")[0]
    for name, (speed, tau) in speeds.items():
        print(f"{name}: {speed / plain:.3f}x, tau without loops {tau:.3f}")
    best = max(speeds, key=lambda name: speeds[name][0])
    save_accelerators(path, dataclasses.replace(trained, settings=by_name[best]))
    print(f"stored in {path}: {best}")
    return {"experiment": "choose", **dataclasses.asdict(by_name[best])}


def _speed(name: str, results: list[dict]) -> tuple[float, float]:
    """Tokens a second over all turns, and tau without loops."""
    turns = [turn for r in results if r["method"] == name for turn in r["turns"]]
    answers = [Answer(**turn["answer"]) for turn in turns]
    tokens = sum(len(answer.token_ids) for answer in answers)
    pairs = [(a.token_ids, a.committed or [1] * len(a.token_ids)) for a in answers]
    seconds = sum(turn["seconds"] for turn in turns)
    return tokens / seconds, metrics.tau(pairs, loops=False)

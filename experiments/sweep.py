"""`--exp=sweep`: exit depth, rank and head size of the stream, in one table.

Every setting is trained on the same labelled rows and judged on the same held-out
answers. Costs are measured in one process, interleaved: what a round of k drafts takes
in plain steps. Predicted speed-up is simulated tau over that cost.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from experiments.costs import seconds_a_round
from experiments.models import load_for_batches
from experiments.options import read_options
from experiments.suite import Settings
from experiments.train import Trainer, TrainOptions
from m2r2_jax import Model, build_method, load
from m2r2_jax.files import write_text
from m2r2_jax.training.labels import LabelStore

_LENGTHS = (1, 2, 3, 4)
_COLUMNS = (
    "exit",
    "rank",
    "head",
    "parameters",
    "d",
    "acceptance by position",
    "tau at 4",
    "best k",
    "predicted speed-up",
)


@dataclasses.dataclass(frozen=True)
class SweepOptions:
    """Options of `--exp=sweep`: one quantity varies at a time.

    Attributes:
      exits: exit layers, at the first rank and head.
      ranks: ranks, at `exit_layer` and the first head.
      heads: ids in the draft head, at `exit_layer` and the first rank; 0 is all.
      exit_layer: where ranks and heads vary.
    """

    exits: tuple[int, ...] = (1, 2, 3, 4, 6)
    ranks: tuple[int, ...] = (64, 32, 256, 576)
    heads: tuple[int, ...] = (8192, 4096, 16384, 0)
    exit_layer: int = 2

    def settings(self) -> list[tuple[int, int, int]]:
        """(exit, rank, head) of every run, each once."""
        rank, head = self.ranks[0], self.heads[0]
        found = [(exit, rank, head) for exit in self.exits]
        found += [(self.exit_layer, rank, head) for rank in self.ranks]
        found += [(self.exit_layer, rank, head) for head in self.heads]
        return list(dict.fromkeys(found))


def run(settings: Settings) -> dict:
    """Trains and measures every setting; finished ones are not trained again."""
    options = read_options(SweepOptions, settings.overrides)
    rows = []
    model, store = (
        load_for_batches(settings),
        LabelStore(settings.data or Path("results/label")),
    )
    for exit_layer, rank, head in options.settings():
        out = settings.out / f"exit{exit_layer}-rank{rank}-head{head}"
        if not (out / "results.json").is_file():
            train = TrainOptions(exit_layer=exit_layer, rank=rank, head=head)
            own = dataclasses.replace(settings, out=out)
            Trainer(model, store, train, own).run()
        held_out = json.loads((out / "results.json").read_text())["held_out"]
        path = str(out / "accelerators.safetensors")
        rows.append({"exit": exit_layer, "rank": rank, "head": head, "path": path})
        rows[-1] |= {"acceptance": held_out["acceptance"]}
    decoding = load(settings.model)
    for row in rows:
        row |= _costs(decoding, row["path"], row["acceptance"])
    record = {"experiment": "sweep", "command": settings.command, "settings": rows}
    write_text(settings.out / "results.json", json.dumps(record, indent=1))
    write_text(settings.out / "results.md", _table(rows) + "\n")
    print(_table(rows))
    return record


def _costs(model: Model, path: str, acceptance: list[float]) -> dict:
    """Costs in plain steps, and what they and the acceptance predict."""
    plain = build_method("autoregressive", model)
    drafting = [
        build_method("m2r2", model, accelerators=path, length=k, min_confidence=0.0)
        for k in _LENGTHS
    ]
    verifying = [build_method("random_draft", model, length=k) for k in _LENGTHS]
    seconds = seconds_a_round(model, [plain, *drafting, *verifying])
    step, rounds = seconds[0], np.array(seconds[1 : 1 + len(_LENGTHS)]) / seconds[0]
    verified = np.array(seconds[1 + len(_LENGTHS) :]) / step
    taus = 1 + np.cumsum(np.cumprod(acceptance))[: len(_LENGTHS)]
    speedups = taus / rounds
    best = int(np.argmax(speedups))
    # A round of k drafts takes k + 1 early passes and saves them in verification.
    draft = (rounds - verified) / np.array(_LENGTHS)
    return {
        "trainable_parameters": drafting[0].trainable_parameters,
        "draft_cost": float(np.median(draft)),
        "round_costs": rounds.tolist(),
        "verification_costs": verified.tolist(),
        "tau": float(taus[-1]),
        "best_length": _LENGTHS[best],
        "predicted_speedup": float(speedups[best]),
    }


def _table(rows: list[dict]) -> str:
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    for row in rows:
        cells = (
            row["exit"],
            row["rank"],
            row["head"] or "all",
            f"{row['trainable_parameters'] / 1e6:.1f} M",
            f"{row['draft_cost']:.3f}",
            " ".join(f"{a:.2f}" for a in row["acceptance"]),
            f"{row['tau']:.2f}",
            row["best_length"],
            f"{row['predicted_speedup']:.2f}x",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)

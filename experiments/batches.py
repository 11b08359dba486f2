"""`--exp=batches`: total speed, speed-up and tau as more rows decode together.

Batches of 1, 2, 4, ... rows take the same prompts, the methods interleaved. A pass over
more rows costs more, so drafts gain less: the table says from where on they lose. Then
every row of the largest batch is held against its single run in exact mode.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax

from experiments import metrics
from experiments.bars import progress_bar
from experiments.options import read_options
from experiments.plots import save_figure
from experiments.prompts import load_prompts
from experiments.suite import Settings
from m2r2_jax import Answer, Model, Session, build_method, load
from m2r2_jax.files import write_text


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """Options of `--exp=batches`.

    Attributes:
      sizes: rows that decode together, rising.
    """

    sizes: tuple[int, ...] = (1, 2, 4, 8, 16)


def run(settings: Settings) -> dict:
    """Measures every method at every size; prints and stores table and plot."""
    options = read_options(BatchOptions, settings.overrides)
    model = load(settings.model)
    prompts = load_prompts(settings.prompts, settings.data_dir, settings.limit)
    encode = model.tokenizer.encode_chat
    ids = [encode([{"role": "user", "content": p.turns[0]}]) for p in prompts]
    if len(ids) % options.sizes[-1]:
        raise ValueError(
            f"{len(ids)} prompts do not fill batches of {options.sizes[-1]}; choose a "
            "--limit that is a multiple of it"
        )
    rows = []
    bar = progress_bar(len(options.sizes), "size")
    for size in options.sizes:
        rows += _measure(model, settings, ids, size)
        bar.update()
    bar.close()
    exact = _exact_rows(model, settings, ids[: options.sizes[-1]])
    record = {
        "experiment": "batches",
        "command": settings.command,
        "model": model.config.name,
        "device_kind": jax.devices()[0].device_kind,
        "num_prompts": len(ids),
        "max_new_tokens": settings.max_new_tokens,
        "rows": rows,
        "exact": exact,
    }
    write_text(settings.out / "results.json", json.dumps(record, indent=1) + "\n")
    write_text(settings.out / "results.md", summary(record))
    _plot(settings.out / "results.png", record)
    print(summary(record))
    return record


def _measure(model: Model, settings: Settings, ids, size: int) -> list[dict]:
    """Every method on all prompts, `size` of them at a time."""
    sessions = {
        name: Session(model, build_method(name, model), batch=size)
        for name in settings.methods
    }
    seconds = dict.fromkeys(sessions, 0.0)
    answers: dict[str, list[Answer]] = {name: [] for name in sessions}
    for start in range(0, len(ids), size):
        group = ids[start : start + size]
        for name, session in sessions.items():
            # Compiles what this group needs.
            session.run(group, settings.max_new_tokens, max_steps=1)
            session.truncate([0] * size)
            found, timing = session.run(group, settings.max_new_tokens)
            seconds[name] += timing.prefill_seconds + timing.decode_seconds
            answers[name] += found
    rates = {
        name: sum(len(a.token_ids) for a in answers[name]) / seconds[name]
        for name in sessions
    }
    return [
        {
            "batch": size,
            "method": name,
            "tokens_per_second": rates[name],
            "speedup": rates[name] / rates["autoregressive"],
            "tau_without_loops": metrics.tau(
                [(a.token_ids, a.committed) for a in answers[name]], loops=False
            ),
        }
        for name in sessions
    ]


def _exact_rows(model: Model, settings: Settings, ids) -> dict[str, str]:
    """Per method, how many rows of one batch equal their single runs."""
    found = {}
    model = model.exact
    single = Session(model, build_method("autoregressive", model))
    alone = [
        single.run([prompt], settings.max_new_tokens)[0][0].token_ids for prompt in ids
    ]
    for name in settings.methods:
        method = build_method(name, model)
        session = Session(model, method, batch=len(ids))
        together, _ = session.run(ids, settings.max_new_tokens)
        same = [a.token_ids == b for a, b in zip(together, alone, strict=True)]
        found[name] = f"{sum(same)} of {len(same)}"
    return found


def summary(record: dict) -> str:
    """The record as Markdown."""
    lines = [
        f"# batches: {record['model']}",
        "",
        f"`{record['command']}`",
        "",
        f"{record['num_prompts']} prompts, at most {record['max_new_tokens']} new "
        f"tokens, greedy, on {record['device_kind']}.",
        "",
        "| batch | method | tokens/s | speed-up | tau w/o loops |",
        "|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        lines.append(
            f"| {row['batch']} | {row['method']} | {row['tokens_per_second']:.1f} | "
            f"{row['speedup']:.2f}x | {row['tau_without_loops']:.2f} |"
        )
    lines += ["", "Rows of the largest batch equal to their single run, exact mode: "]
    lines[-1] += ", ".join(f"{name} {n}" for name, n in record["exact"].items()) + "."
    return "\n".join(lines) + "\n"


def _plot(path: Path, record: dict) -> None:
    """Tokens/s and speed-up by batch size."""
    names = list(record["exact"])

    def draw(figure) -> None:
        left, right = figure.subplots(1, 2)
        for name in names:
            own = [row for row in record["rows"] if row["method"] == name]
            sizes = [row["batch"] for row in own]
            rates = [row["tokens_per_second"] for row in own]
            left.plot(sizes, rates, marker="o", label=name)
            right.plot(sizes, [row["speedup"] for row in own], marker="o")
        left.set_ylabel("tokens/s, all rows")
        right.set_ylabel("over plain decoding of the same batch")
        right.axhline(1, color="black", linewidth=0.8)
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xlabel("rows decoded together")
        left.legend()

    save_figure(path, draw)

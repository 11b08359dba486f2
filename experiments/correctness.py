"""`--exp=correctness`: every drafter against plain decoding, and where they part.

Three modes: exact (f32, products in one shape: equal without exception), one row (f32,
the default: equal but for near-ties), bf16 (products round differently with the number
of rows, so answers part at near-ties). In each mode a method is held against plain
decoding of that mode. For every first divergence the gap between the two best logits
is listed: one wider than `TIE` is no tie but an error.
"""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp

from experiments import metrics
from experiments.bars import progress_bar
from experiments.margins import logit_margin
from experiments.prompts import load_prompts
from experiments.suite import Settings
from m2r2_jax import Model, SamplingParams, Session, build_method, load
from m2r2_jax.files import write_text

MODES = ("exact", "one row", "bf16")
TIE = {"exact": 0.0, "one row": 1e-4, "bf16": 0.25}


def run(settings: Settings) -> dict:
    """Runs all methods in all modes; raises nothing, the record says what parted."""
    prompts = load_prompts(settings.prompts, settings.data_dir, settings.limit)
    rows = []
    bar = progress_bar(len(MODES) * len(settings.methods), "method")
    for mode in MODES:
        dtype = jnp.bfloat16 if mode == "bf16" else jnp.float32
        model = load(settings.model, dtype=dtype)
        encode = model.tokenizer.encode_chat
        ids = [encode([{"role": "user", "content": p.turns[0]}]) for p in prompts]
        answers = functools.partial(_answers, model, settings, mode == "exact", ids)
        plain = answers("autoregressive")
        for name in settings.methods:
            if name != "autoregressive":
                rows.append(_row(model, mode, name, ids, plain, answers(name)))
            bar.update()
    bar.close()
    record = {
        "experiment": "correctness",
        "command": settings.command,
        "device_kind": jax.devices()[0].device_kind,
        "sampling": dataclasses.asdict(_sampling(settings)),
        "max_new_tokens": settings.max_new_tokens,
        "num_prompts": len(prompts),
        "rows": rows,
    }
    write_text(settings.out / "results.json", json.dumps(record, indent=1) + "\n")
    write_text(settings.out / "results.md", summary(record))
    print(summary(record))
    return record


def _sampling(settings: Settings) -> SamplingParams:
    temperature = float(settings.overrides.get("temperature", 0.0))
    return SamplingParams(temperature=temperature, seed=settings.seed)


def _answers(
    model: Model, settings: Settings, exact: bool, prompts, name: str
) -> list[list[int]]:
    model = model.exact if exact else model
    session = Session(model, build_method(name, model))
    how = _sampling(settings)
    return [
        session.run([ids], settings.max_new_tokens, sampling=how)[0][0].token_ids
        for ids in prompts
    ]


def _row(model: Model, mode: str, name: str, prompts, plain, found) -> dict:
    """One method in one mode: answers that are equal, and where the others part."""
    divergences = []
    for index, (ids, expected, own) in enumerate(
        zip(prompts, plain, found, strict=True)
    ):
        at = metrics.first_difference(own, expected)
        if at is not None:
            margin = logit_margin(model, ids + own[:at])
            divergences.append({"prompt": index, "token": at, "margin": margin})
    return {
        "mode": mode,
        "method": name,
        "answers": len(found),
        "divergences": divergences,
        "ties": all(d["margin"] <= TIE[mode] for d in divergences),
    }


def summary(record: dict) -> str:
    """The record as Markdown, divergences and margins included."""
    lines = [
        "# correctness",
        "",
        f"`{record['command']}`",
        "",
        f"{record['num_prompts']} prompts, {record['max_new_tokens']} new tokens, "
        f"temperature {record['sampling']['temperature']:g}, "
        f"{record['device_kind']}.",
        "",
        "| mode | method | equal to plain | first divergences (token: margin) |",
        "|---|---|---|---|",
    ]
    for row in record["rows"]:
        apart = row["divergences"]
        cells = (f"{d['token']}: {d['margin']:.1e}" for d in apart)
        equal = f"{row['answers'] - len(apart)} of {row['answers']}"
        lines.append(
            f"| {row['mode']} | {row['method']} | {equal} | {', '.join(cells) or '-'} |"
        )
    bad = [row for row in record["rows"] if not row["ties"]]
    verdict = (
        "none" if not bad else ", ".join(f"{r['method']} ({r['mode']})" for r in bad)
    )
    ties = ", ".join(f"{mode} {tie:g}" for mode, tie in TIE.items())
    lines += ["", f"Divergences wider than a tie ({ties}): {verdict}."]
    return "\n".join(lines) + "\n"

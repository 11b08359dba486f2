"""Decoding methods side by side: same prompts, same process, interleaved.

Protocol: prompt by prompt, every method answers the whole conversation, each turn
reusing the cache of the one before; the order of the methods rotates. A shape that was
not seen yet is compiled before its turn is timed. A turn's time is the wall-clock
time of prefill and decoding together.
"""

from __future__ import annotations

import dataclasses
import resource
import sys

import jax

from experiments import report
from experiments.bars import progress_bar
from experiments.margins import logit_margin
from experiments.progress import Progress
from experiments.prompts import Prompt, load_prompts
from experiments.report import Turn
from experiments.suite import Settings
from m2r2_jax import Answer, Method, Model, SamplingParams, Session, build_method, load
from m2r2_jax.models.sharding import batch_size, make_mesh
from m2r2_jax.ops.compilation import CompileClock

EXACT_REFERENCE = "autoregressive_exact"


def measure(experiment: str, settings: Settings) -> dict:
    """Runs the methods over the prompts, prints the table, writes the record."""
    prompts = load_prompts(settings.prompts, settings.data_dir, settings.limit)
    exact, temperature, method_settings = _overrides(settings)
    model = load(settings.model, mesh=make_mesh(settings.mesh))
    methods = _methods(model, settings.methods, exact, method_settings)
    batch = batch_size(model.mesh)
    groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    progress = Progress(settings.out / "progress.jsonl", _identity(settings, model))
    runner = Runner(model, methods, settings, temperature, exact)
    print(
        f"{model.config.name} ({model.stream_dtype}) on "
        f"{jax.devices()[0].device_kind}: {len(prompts)} {settings.prompts} prompts, "
        f"methods {', '.join(method.name for method in methods)}"
    )
    bar = progress_bar(len(prompts) * len(methods), "answer set")
    for index, group in enumerate(groups):
        if (done := progress.get(group)) is None:
            progress.add(group, runner.run_group(group, index, bar))
        else:
            bar.update(len(group) * len(done))
    bar.close()
    turns = [turn for group in groups for turn in progress.turns(group)]
    record = _record(experiment, settings, model, methods, progress, turns)
    record["temperature"] = temperature
    report.write(settings.out, record, turns)
    progress.finish()
    print(
        f"\n{report.summary(record)}\nWritten to {settings.out}/: results.json, "
        "answers.jsonl, results.md, results.png"
    )
    return record


def _identity(settings: Settings, model: Model) -> dict:
    """What must be equal for finished prompts of an earlier run to count."""
    asked = dataclasses.asdict(settings)
    for untimed in ("command", "out"):
        asked.pop(untimed)
    device = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    return {**asked, **device, "model": model.config.name}


def _overrides(settings: Settings) -> tuple[bool, float, dict[str, dict]]:
    """Reads `--set`: exact, temperature, METHOD.SETTING=N, m2r2.accelerators=FILE."""
    exact, temperature, by_method = False, 0.0, {}
    for key, value in settings.overrides.items():
        method, dot, name = key.partition(".")
        number = _number(value)
        if key == "exact" and value in ("true", "false"):
            exact = value == "true"
        elif key == "temperature" and number is not None:
            temperature = float(number)
        elif dot and method in settings.methods and number is not None:
            by_method.setdefault(method, {})[name] = number
        elif key == "m2r2.accelerators":
            by_method.setdefault(method, {})[name] = value
        else:
            raise ValueError(
                f"--set {key}={value}: known are exact=true|false, temperature=T, "
                "m2r2.accelerators=FILE and "
                f"METHOD.SETTING=N with METHOD one of {', '.join(settings.methods)}"
            )
    return exact, temperature, by_method


def _number(text: str) -> int | float | None:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            pass
    return None


def _methods(
    model: Model, names: tuple[str, ...], exact: bool, settings: dict[str, dict]
) -> list[Method]:
    """The methods of the run, plain decoding first: everything is held against it."""
    others = [name for name in names if name != "autoregressive"]
    methods = [build_method("autoregressive", model)]
    if exact:
        methods.append(dataclasses.replace(methods[0], name=EXACT_REFERENCE))
    others = [build_method(name, model, **settings.get(name, {})) for name in others]
    return methods + others


class Runner:
    """Runs groups of conversations through the methods and times them."""

    def __init__(
        self,
        model: Model,
        methods: list[Method],
        settings: Settings,
        temperature: float,
        exact: bool,
    ):
        self.model, self.methods, self.settings = model, methods, settings
        self.temperature, self.exact = temperature, exact
        self.clock = CompileClock()
        self._seen: set[tuple] = set()

    def run_group(self, group: list[Prompt], index: int, bar) -> list[dict]:
        """All methods on the conversations of a group, in rotated order."""
        shift = index % len(self.methods)
        results = []
        for method in self.methods[shift:] + self.methods[:shift]:
            bar.set_description(method.name)
            before = self.clock.seconds
            turns = self._converse(group, method)
            results.append(
                {
                    "method": method.name,
                    "turns": [dataclasses.asdict(turn) for turn in turns],
                    "compile_seconds": self.clock.seconds - before,
                    "peak_memory_bytes": peak_memory_bytes(),
                }
            )
            bar.update(len(group))
        return results

    def _converse(self, group: list[Prompt], method: Method) -> list[Turn]:
        batch = batch_size(self.model.mesh)
        # Speed-up is told over plain decoding as users run it, in exact mode too.
        exact = self.exact and method.name != "autoregressive"
        session = Session(self.model.exact if exact else self.model, method, batch)
        # The last group may be short of rows: its first conversation fills them.
        rows = [*group, *[group[0]] * (batch - len(group))]
        messages: list[list[dict]] = [[] for _ in rows]
        turns = []
        for number in range(max(len(prompt.turns) for prompt in rows)):
            for row, prompt in enumerate(rows):
                if number < len(prompt.turns):
                    content = prompt.turns[number]
                    messages[row].append({"role": "user", "content": content})
            encode = self.model.tokenizer.encode_chat
            prompt_ids = [encode(conversation) for conversation in messages]
            answers, seconds = self._timed_run(session, prompt_ids)
            for row, answer in enumerate(answers):
                text = self.model.tokenizer.decode(answer.token_ids)
                messages[row].append({"role": "assistant", "content": text})
                if row < len(group) and number < len(group[row].turns):
                    prompt = group[row]
                    turns.append(
                        Turn(
                            prompt.id,
                            prompt.category,
                            number,
                            method.name,
                            prompt_ids[row],
                            text,
                            answer,
                            seconds / len(group),
                        )
                    )
        return turns

    def _timed_run(self, session: Session, prompts) -> tuple[list[Answer], float]:
        """One turn, after compiling what it needs outside the timed run."""
        budget = self.settings.max_new_tokens
        how = SamplingParams(temperature=self.temperature, seed=self.settings.seed)
        plan = session.plan(prompts, budget)
        shape = (session.method.name, plan.chunks, plan.capacity, bool(max(plan.kept)))
        if shape not in self._seen:
            kept = [len(ids) for ids in session.cached_ids]
            session.run(prompts, budget, sampling=how, max_steps=1)
            session.truncate(kept)
            self._seen.add(shape)
        answers, timing = session.run(prompts, budget, sampling=how)
        return answers, timing.prefill_seconds + timing.decode_seconds


def _record(
    experiment: str,
    settings: Settings,
    model: Model,
    methods: list[Method],
    progress: Progress,
    turns: list[Turn],
) -> dict:
    names = [method.name for method in methods]
    reference = EXACT_REFERENCE if EXACT_REFERENCE in names else "autoregressive"
    rows = []
    for method in methods:
        results = [r for r in progress.results() if r["method"] == method.name]
        row = report.summarise(method.name, turns, "autoregressive", reference)
        for divergence in row["divergences"]:
            divergence["margin"] = logit_margin(model, divergence.pop("prefix"))
        row["compile_seconds"] = sum(r["compile_seconds"] for r in results)
        row["peak_memory_bytes"] = max(r["peak_memory_bytes"] for r in results)
        row["trainable_parameters"] = method.trainable_parameters
        row["note"] = method.note
        rows.append(row)
    return {
        "experiment": experiment,
        "command": settings.command,
        "device": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "dtype": str(model.stream_dtype),
        "mesh": settings.mesh,
        "model": model.config.name,
        "prompts": settings.prompts,
        "num_prompts": len({turn.prompt_id for turn in turns}),
        "max_new_tokens": settings.max_new_tokens,
        "reference": reference,
        "versions": {"jax": jax.__version__, "python": sys.version.split()[0]},
        "methods": rows,
    }


def peak_memory_bytes() -> int:
    """Peak so far: of the device where it keeps count, else of this process."""
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

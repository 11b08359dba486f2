"""From measured turns to a record, a table, a plot and files, written atomically."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from experiments import metrics
from experiments.plots import save_figure
from m2r2_jax import Answer
from m2r2_jax.files import write_text

_COLUMNS = (
    "method",
    "tokens/s",
    "speed-up",
    "tau",
    "tau w/o loops",
    "acceptance by position",
    "identical",
)


@dataclasses.dataclass(frozen=True)
class Turn:
    """One answer of one method.

    Attributes:
      prompt_id: of the suite.
      category: of the prompt.
      turn: 0-based.
      method: its name.
      prompt_ids: token ids of the conversation up to the answer.
      text: the answer.
      answer: ids and per-round counts.
      seconds: wall-clock share of this row: the run's time over its rows.
    """

    prompt_id: str
    category: str
    turn: int
    method: str
    prompt_ids: list[int]
    text: str
    answer: Answer
    seconds: float


def summarise(
    method: str, turns: Sequence[Turn], baseline: str, reference: str
) -> dict:
    """One method's row of the record.

    Args:
      method: its name.
      turns: all turns of all methods.
      baseline: the method that speed-ups are relative to.
      reference: the method whose answers must be met.
    """
    own = [turn for turn in turns if turn.method == method]
    answers = [
        (
            turn.answer.token_ids,
            turn.answer.committed or [1] * len(turn.answer.token_ids),
        )
        for turn in own
    ]
    divergences = _divergences(own, [t for t in turns if t.method == reference])
    seconds, tokens = sum(t.seconds for t in own), sum(len(ids) for ids, _ in answers)
    plain = [turn for turn in turns if turn.method == baseline]
    plain_tokens = sum(len(turn.answer.token_ids) for turn in plain)
    plain_rate = plain_tokens / sum(turn.seconds for turn in plain)
    return {
        "method": method,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "speedup": tokens / seconds / plain_rate,
        "tau": metrics.tau(answers, loops=True),
        "tau_without_loops": metrics.tau(answers, loops=False),
        "acceptance_by_position": metrics.acceptance_by_position(
            [count for turn in own for count in turn.answer.proposed],
            [count for turn in own for count in turn.answer.accepted],
        ),
        "identical_to_autoregressive": not divergences,
        "turns": len(own),
        "divergences": divergences,
    }


def _divergences(own: Sequence[Turn], reference: Sequence[Turn]) -> list[dict]:
    """Where answers first leave the reference's, with the ids that lead there.

    A turn whose prompt already differs is not compared: its first turn is listed.
    """
    expected = {(turn.prompt_id, turn.turn): turn for turn in reference}
    found = []
    for turn in own:
        other = expected[turn.prompt_id, turn.turn]
        ids, other_ids = turn.answer.token_ids, other.answer.token_ids
        position = metrics.first_difference(ids, other_ids)
        if turn.prompt_ids == other.prompt_ids and position is not None:
            found.append(
                {
                    "prompt_id": turn.prompt_id,
                    "turn": turn.turn,
                    "position": position,
                    "prefix": turn.prompt_ids + ids[:position],
                }
            )
    return found


def table(record: dict) -> str:
    """The record's methods as a Markdown table with padded columns."""
    rows = [_COLUMNS, *(_row(method) for method in record["methods"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _row(method: dict) -> tuple[str, ...]:
    turns, apart = method["turns"], len(method["divergences"])
    return (
        method["method"],
        f"{method['tokens_per_second']:.1f}",
        f"{method['speedup']:.2f}x",
        _number(method["tau"]),
        _number(method["tau_without_loops"]),
        " ".join(f"{rate:.2f}" for rate in method["acceptance_by_position"]) or "-",
        f"{turns - apart} of {turns}",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def summary(record: dict) -> str:
    """The record as Markdown: what ran, the table, and what a reader must know."""
    memory = max(m["peak_memory_bytes"] for m in record["methods"]) / 1e9
    compiling = sum(m["compile_seconds"] for m in record["methods"])
    lines = [
        f"# {record['experiment']}: {record['model']}, {record['prompts']} prompts",
        "",
        f"`{record['command']}`",
        "",
        f"{record['num_prompts']} prompts, at most {record['max_new_tokens']} new "
        f"tokens a turn, temperature {record['temperature']:g}, {record['dtype']} on "
        f"{record['device_kind']}, mesh {record['mesh']}, "
        f"jax {record['versions']['jax']}.",
        "",
        table(record),
        "",
        "Speed-up: total tokens/s over plain decoding's in this run, prefill included, "
        "compilation not.",
        "tau: tokens per pass of the full model; without loops: up to the third "
        "appearance of an 8-gram.",
        f"Identical: turns whose ids equal those of {record['reference']}.",
        f"Peak memory {memory:.2f} GB, compilation {compiling:.0f} s.",
    ]
    lines += [f"{m['method']}: {m['note']}." for m in record["methods"] if m["note"]]
    lines += [
        f"{m['method']}: slower than plain decoding here; its drafts cost more than "
        "they save."
        for m in record["methods"]
        if m["speedup"] < 1 and m["acceptance_by_position"]
    ]
    for method in record["methods"]:
        lines += [
            f"{method['method']}: prompt {d['prompt_id']}, turn {d['turn'] + 1}, "
            f"leaves the reference at token {d['position']}, where the two best logits "
            f"are {d['margin']:.1e} apart."
            for d in method["divergences"]
        ]
    return "\n".join(lines) + "\n"


def answer_lines(turns: Sequence[Turn]) -> str:
    """`answers.jsonl`: one line an answer."""
    return "".join(
        json.dumps(
            {
                "prompt_id": turn.prompt_id,
                "category": turn.category,
                "turn": turn.turn,
                "method": turn.method,
                "text": turn.text,
                "token_ids": turn.answer.token_ids,
                "accepted_lengths": turn.answer.committed,
                "seconds": turn.seconds,
            }
        )
        + "\n"
        for turn in turns
    )


def write(out: Path, record: dict, turns: Sequence[Turn]) -> None:
    """Writes results.json, answers.jsonl, results.md and results.png into a folder."""
    write_text(out / "answers.jsonl", answer_lines(turns))
    write_text(out / "results.md", summary(record))
    _plot(out / "results.png", record)
    write_text(out / "results.json", json.dumps(record, indent=1) + "\n")


def _plot(path: Path, record: dict) -> None:
    """Speed-up of each method, and its acceptance by position."""
    methods = record["methods"]
    names = [method["method"] for method in methods]

    def draw(figure) -> None:
        left, right = figure.subplots(1, 2)
        speedups = [method["speedup"] for method in methods]
        bars = left.barh(names, speedups, color="#4477aa")
        left.bar_label(bars, fmt="%.2fx", padding=3)
        left.axvline(1, color="black", linewidth=0.8)
        left.invert_yaxis()
        left.margins(x=0.15)
        left.set_xlabel("tokens/s over plain decoding")
        for method in methods:
            if rates := method["acceptance_by_position"]:
                positions = range(1, len(rates) + 1)
                right.plot(positions, rates, marker="o", label=method["method"])
        right.set_xlabel("draft position")
        right.set_ylabel("accepted, given all before")
        right.set_ylim(0, 1)
        if right.lines:
            right.legend()
        figure.suptitle(f"{record['model']}, {record['prompts']} prompts")

    save_figure(path, draw)

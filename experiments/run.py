"""Command line of the experiments: `python -m experiments.run --exp=mtbench`.

Nothing heavy is imported until the arguments are known to be right.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.prompts import SUITES
from experiments.suite import EXPERIMENTS, METHOD_NAMES, Settings

_ALL = -1


def parse(argv: Sequence[str] | None) -> tuple[str, Settings]:
    """Reads the command line into an experiment's name and its settings."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.run",
        description="Measures decoding methods on a real model and real prompts.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="experiments:\n"
        + "\n".join(f"  {name:10} {e.summary}" for name, e in EXPERIMENTS.items()),
    )
    parser.add_argument(
        "--exp", required=True, choices=EXPERIMENTS, help="which experiment to run"
    )
    parser.add_argument(
        "--prompts",
        default="embedded",
        metavar="NAME",
        help=f"prompt suite: {', '.join(SUITES)}, or a .jsonl file (default: embedded)",
    )
    parser.add_argument(
        "--data_dir",
        type=Path,
        metavar="DIR",
        help="folder with the published suites as NAME.jsonl",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="label: text as .jsonl or a folder of them (default: results/write); "
        "train: labels (default: results/label)",
    )
    parser.add_argument(
        "--limit",
        type=_limit,
        metavar="N|all",
        help="how many prompts or conversations, from the first on (default: 8 "
        "prompts, 2048 conversations to write, all to learn from)",
    )
    parser.add_argument(
        "--max_new_tokens", type=_count, default=128, metavar="N", help="tokens a turn"
    )
    parser.add_argument(
        "--methods",
        type=_methods,
        default=None,
        metavar="a,b|all",
        help=f"decoding methods: {', '.join(METHOD_NAMES)} "
        "(default: those of the experiment)",
    )
    parser.add_argument(
        "--model",
        metavar="FILE.gguf",
        help="a dense Llama-architecture GGUF (default: SmolLM2-135M-Instruct, "
        "fetched on first use)",
    )
    parser.add_argument(
        "--mesh",
        default="data:1",
        help="devices, as data:N; N conversations decode together (default: data:1)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="record's folder (default: results/EXP)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of sampling noise")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="key=value",
        dest="overrides",
        type=_override,
        help="mtbench: exact=true, temperature=T, or METHOD.SETTING=N such as "
        "m2r2.length=4; others: an option of theirs (a wrong one lists them)",
    )
    given = vars(parser.parse_args(argv))
    name = given.pop("exp")
    given["out"] = given["out"] or Path("results") / name
    if file := next(filter(Path.is_file, (given["out"], *given["out"].parents)), None):
        parser.error(f"argument --out: {str(file)!r} is a file; name a folder")
    given["methods"] = given["methods"] or EXPERIMENTS[name].default_methods
    if given["limit"] is None:
        given["limit"] = EXPERIMENTS[name].default_limit
    elif given["limit"] == _ALL:
        given["limit"] = None
    given["overrides"] = dict(given["overrides"])
    return name, Settings(command=_command(argv), **given)


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs an experiment and returns its record; callable from a notebook.

    Args:
      argv: arguments without the program's name; the process's own when None.
    """
    name, settings = parse(argv)
    try:
        return EXPERIMENTS[name].run(settings)
    except (ValueError, FileNotFoundError) as error:
        if argv is not None:
            raise
        sys.exit(f"error: {error}")


def _command(argv: Sequence[str] | None) -> str:
    return " ".join(
        ["python -m experiments.run", *(sys.argv[1:] if argv is None else argv)]
    )


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return int(text)


def _limit(text: str) -> int:
    return _ALL if text == "all" else _count(text)


def _methods(text: str) -> tuple[str, ...]:
    names = tuple(METHOD_NAMES) if text == "all" else tuple(text.split(","))
    if unknown := [name for name in names if name not in METHOD_NAMES]:
        raise argparse.ArgumentTypeError(
            f"unknown method {', '.join(unknown)}; choose from "
            f"{', '.join(METHOD_NAMES)}, or all"
        )
    return names


def _override(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not key=value")
    return key, value


if __name__ == "__main__":
    main()

"""`--exp=tpu_compile`: programs through the real TPU compiler, without a TPU.

`libtpu` compiles for a described topology on any machine. What it accepts, what it
plans to keep in memory and how many bytes and operations it counts are facts; times are
not measured, but bounded by the chips' published peaks. The same kernels are lowered
for GPU, as far as that goes without one: to the dialect that the driver compiles.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json

import jax
import jax.export

from experiments.compiled import (
    PEAKS,
    Program,
    compile_for,
    first_lines,
    topology_device,
)
from experiments.kernel_shapes import KernelCall, kernel_calls
from experiments.model_programs import model_programs
from experiments.options import read_options
from experiments.suite import Settings
from m2r2_jax.files import write_text

_GPU_CALL = "mosaic_gpu"


@dataclasses.dataclass(frozen=True)
class Options:
    """What `--set` may change.

    Attributes:
      topology: the chips to compile for, as libtpu names them; programs use one.
    """

    topology: str = "v5e:2x2"


def run(settings: Settings) -> dict:
    """Compiles every program, prints and stores what became of it."""
    options = read_options(Options, settings.overrides)
    device = topology_device(options.topology)
    calls = kernel_calls()
    programs = kernel_programs(calls) + model_programs()
    record = {
        "experiment": "tpu_compile",
        "command": settings.command,
        "topology": options.topology,
        "device_kind": device.device_kind,
        "versions": {"jax": jax.__version__, "libtpu": _version("libtpu")},
        "peaks": PEAKS,
        "tpu": [compile_for(device, program) for program in programs],
        "gpu": [lower_for_gpu(call) for call in calls],
    }
    write_text(settings.out / "results.json", json.dumps(record, indent=1) + "\n")
    text = summary(record)
    write_text(settings.out / "results.md", text)
    print(text)
    return record


def kernel_programs(calls: list[KernelCall]) -> list[Program]:
    """The TPU kernels as programs of their own."""
    programs = []
    for call in calls:
        function = functools.partial(call.run, "tpu")
        programs.append(Program(call.name, jax.jit(function).lower, call.arguments))
    return programs


def lower_for_gpu(call: KernelCall) -> dict:
    """Whether a kernel lowers for CUDA; a driver would go on from there."""
    function = functools.partial(call.run, "gpu")
    try:
        exported = jax.export.export(jax.jit(function), platforms=["cuda"])(
            call.arguments
        )
    except Exception as error:
        return {"program": call.name, "error": first_lines(error)}
    kernels = exported.mlir_module().count(f"@{_GPU_CALL}")
    return {"program": call.name, "error": None, "kernels": kernels}


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def summary(record: dict) -> str:
    """The record as Markdown."""
    chips = list(record["peaks"])
    head = ["program", "result", "kernels", "arguments MB", "temp MB", "copied MB"]
    head += ["GFLOP", "moved MB", *(f"{chip} µs" for chip in chips), "fingerprint"]
    versions = ", ".join(f"{name} {v}" for name, v in record["versions"].items())
    lines = [
        f"# tpu_compile: {record['topology']} ({record['device_kind']}), {versions}",
        "",
        "Microseconds are bounds from the chips' published peaks, not times. Copied: "
        "arrays that the compiler brings into another layout on every call.",
        "",
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
    ]
    lines += [_tpu_line(row, chips, len(head)) for row in record["tpu"]]
    lines += [
        "",
        "Lowered for CUDA (no driver here, so neither compiled nor run):",
        "",
        "| program | result |",
        "|---|---|",
    ]
    for row in record["gpu"]:
        result = row["error"] or f"lowered, {row['kernels']} kernel"
        lines.append(f"| {row['program']} | {_cell(result)} |")
    return "\n".join(lines) + "\n"


def _tpu_line(row: dict, chips: list[str], width: int) -> str:
    if row["error"]:
        cells = [row["program"], _cell(row["error"])] + ["-"] * (width - 2)
        return "| " + " | ".join(cells) + " |"
    cells = [
        row["program"],
        "compiled",
        _number(row["tpu_custom_calls"], 1, 0),
        *(
            _number(row[f"{size}_bytes"], 1e6, 2)
            for size in ("argument", "temp", "copied")
        ),
        _number(row["flops"], 1e9, 3),
        _number(row["bytes_accessed"], 1e6, 2),
        *(_number(row["roofline_seconds"][chip], 1e-6, 1) for chip in chips),
        (row["fingerprint"] or "-")[:8],
    ]
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None, unit: float, digits: int) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")

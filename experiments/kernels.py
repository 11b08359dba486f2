"""`--exp=kernels`: the kernels' times on the accelerator of this machine.

Each kernel against XLA on the same stacked rows, against two passes, one for each
stream, and against a copy of memory. Calls take turns over more copies of their inputs
than any cache holds, many in one program, so that neither caches nor dispatch count.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernel_shapes import KernelCall, kernel_calls
from experiments.suite import Settings
from m2r2_jax.files import write_text

# More than on-chip memory and caches hold (128 MiB of VMEM, 50 MiB of L2).
_ROTATED_BYTES, _MOST_COPIES = 2**28, 128
_COPY_BYTES = 2**29
_WARM_UPS, _REPEATS = 2, 9


def run(settings: Settings) -> dict:
    """Times every kernel at its shapes; prints and stores the table.

    Raises:
      ValueError: there is no accelerator.
    """
    backend = jax.default_backend()
    if backend not in ("tpu", "gpu"):
        raise ValueError(
            f"kernels times an accelerator, and jax finds only {backend} here; run it "
            "on a machine with a TPU or a Hopper GPU (tpu_compile needs none)"
        )
    bandwidth = copy_bandwidth()
    record = {
        "experiment": "kernels",
        "command": settings.command,
        "device_kind": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__},
        "copy_bandwidth": bandwidth,
        "kernels": [measure(call, backend) for call in kernel_calls()],
    }
    write_text(settings.out / "results.json", json.dumps(record, indent=1) + "\n")
    text = summary(record)
    write_text(settings.out / "results.md", text)
    print(text)
    return record


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy of 512 MiB."""
    array = jnp.ones(_COPY_BYTES // 4, jnp.float32)
    return 2 * array.nbytes / seconds(jax.jit(lambda a: -a), array)


def measure(call: KernelCall, implementation: str) -> dict:
    """Seconds a call of the kernel, of XLA on stacked rows, and of two passes."""
    arguments = jax.tree.leaves(call.arguments)
    size = sum(math.prod(a.shape) * a.dtype.itemsize for a in arguments)
    copies = min(max(_ROTATED_BYTES // size, 2), _MOST_COPIES)
    rotated = [_fill(call.arguments, seed) for seed in range(copies)]
    ways = {
        "kernel": functools.partial(call.run, implementation),
        "stacked": functools.partial(call.run, "reference"),
        "apart": call.run_apart,
    }
    row = {"program": call.name, "bytes": size, "error": None}
    for name, way in ways.items():
        try:
            whole = seconds(_all_of(way), rotated)
        except NotImplementedError as error:
            return row | {"error": str(error)}
        row[f"{name}_seconds"] = whole / copies
    return row


def _all_of(way: Callable) -> Callable:
    """One program that calls `way` once for each copy of the arguments."""
    return jax.jit(lambda rotated: [way(arguments) for arguments in rotated])


def seconds(program: Callable, arguments) -> float:
    """Median time of a program after warm-up."""
    taken = []
    for _ in range(_WARM_UPS + _REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(program(arguments))
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[_WARM_UPS:])


def _fill(arguments: dict, seed: int) -> dict:
    """Arrays of the given shapes; every row reads the whole cache."""
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        name = getattr(path[0], "key", "")
        if name in ("start_B", "stop_B"):
            last = arguments["keys_JSH"].shape[1] if name == "stop_B" else 0
            return jnp.full(leaf.shape, last, leaf.dtype)
        if leaf.dtype == jnp.bool_:
            return jnp.ones(leaf.shape, bool)
        if leaf.dtype == jnp.int8:
            return jnp.asarray(rng.integers(-127, 128, leaf.shape, np.int8))
        return jnp.asarray(rng.standard_normal(leaf.shape, np.float32), leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, arguments)


def summary(record: dict) -> str:
    """The record as Markdown."""
    bandwidth = record["copy_bandwidth"]
    lines = [
        f"# kernels: {record['device_kind']}, jax {record['versions']['jax']}",
        "",
        f"A copy of memory moves {bandwidth / 1e9:.0f} GB/s.",
        "",
        "| program | kernel µs | of a copy's speed | XLA, rows stacked µs "
        "| two passes µs |",
        "|---|---|---|---|---|",
    ]
    for row in record["kernels"]:
        if row["error"]:
            lines.append(f"| {row['program']} | {row['error']} | - | - | - |")
            continue
        share = row["bytes"] / row["kernel_seconds"] / bandwidth
        kernel, stacked, apart = (
            f"{row[f'{way}_seconds'] * 1e6:.1f}"
            for way in ("kernel", "stacked", "apart")
        )
        lines.append(
            f"| {row['program']} | {kernel} | {share:.0%} | {stacked} | {apart} |"
        )
    return "\n".join(lines) + "\n"

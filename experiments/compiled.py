"""The TPU compiler without a TPU: what it makes of a program."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import math
import os
import re
import time
from collections.abc import Callable, Iterator

# Read when jax and libtpu are first used: arrays stay on the CPU, the compiler looks
# for no TPU, and a second process may use it at the same time.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
from jax.experimental import topologies

# Published peaks of one chip: bf16 operations and bytes of HBM, per second.
PEAKS = {
    "v5e": {"flops": 197e12, "bytes": 819e9},
    "v6e": {"flops": 918e12, "bytes": 1640e9},
}
_CUSTOM_CALL = 'custom_call_target="tpu_custom_call"'
_COPY = re.compile(r"= (\w+)\[([\d,]*)\]\S* copy\(")
_SOURCE_TABLES = re.compile(
    r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*"
)


@dataclasses.dataclass(frozen=True)
class Program:
    """Something to compile.

    Attributes:
      name: in tables.
      lower: abstract arguments to what `jax.jit(...).lower` returns.
      arguments: a pytree of `jax.ShapeDtypeStruct`.
    """

    name: str
    lower: Callable
    arguments: object


def topology_device(topology: str):
    """A device of a topology that is not here.

    Raises:
      ValueError: libtpu is not installed, or does not know the topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "tpu_compile needs the TPU compiler: pip install libtpu (the extra "
            "tpu-check); no TPU is needed"
        )
    try:
        return topologies.get_topology_desc(topology, platform="tpu").devices[0]
    except Exception as error:
        raise ValueError(
            f"--set topology={topology}: libtpu refuses it ({error}); try v5e:2x2 or "
            "v6e:2x2"
        ) from error


def compile_for(device, program: Program) -> dict:
    """What the TPU compiler says of a program; `error` is None where it compiled."""
    started = time.perf_counter()
    try:
        with _without_lines():
            compiled = program.lower(placed(device, program.arguments)).compile()
    except Exception as error:
        return {"program": program.name, "error": first_lines(error)}
    row = {
        "program": program.name,
        "error": None,
        "compile_seconds": time.perf_counter() - started,
    }
    return row | facts(compiled)


def placed(device, arguments):
    """The abstract arguments on a device, which a program is then lowered for."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments
    )


@contextlib.contextmanager
def _without_lines() -> Iterator[None]:
    """Programs lowered here do not name the lines that they come from."""
    limit = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)


def facts(compiled) -> dict:
    """Memory, work and identity of a compiled program.

    What is read from its HLO is None where this jaxlib cannot print it: libtpu may be
    newer.
    """
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    flops, moved = cost.get("flops", 0.0), cost.get("bytes accessed", 0.0)
    try:
        hlo = compiled.as_text()
    except jax.errors.JaxRuntimeError:
        hlo = None
    return {
        "tpu_custom_calls": hlo and hlo.count(_CUSTOM_CALL),
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "copied_bytes": hlo and copied_bytes(hlo),
        "flops": flops,
        "bytes_accessed": moved,
        "roofline_seconds": {
            chip: max(flops / peak["flops"], moved / peak["bytes"])
            for chip, peak in PEAKS.items()
        },
        "fingerprint": hlo and fingerprint(hlo),
    }


def copied_bytes(hlo: str) -> int:
    """Bytes that `copy` operations write: arrays brought into another layout.

    Of a loop's body once.
    """
    total = 0
    for dtype, shape in _COPY.findall(hlo):
        bits = re.search(r"\d+", dtype)
        size = math.prod(int(side) for side in shape.split(",") if side)
        total += size * (int(bits[0]) if bits else 8) // 8
    return total


def fingerprint(hlo: str) -> str:
    """Of a program's HLO, whatever files and lines it came from.

    Kernels in it are serialised; see `_without_lines`.
    """
    text = re.sub(r", metadata=\{[^}]*\}", "", hlo)
    text = _SOURCE_TABLES.sub("", text)
    return hashlib.sha256(text.encode()).hexdigest()


def first_lines(error: Exception) -> str:
    """The type and the beginning of an error; compilers append whole programs."""
    return f"{type(error).__name__}: {error}"[:500]

"""`--exp=profile`: where a step and a round spend their time on this machine.

Everything is measured in one process, the alternatives taking turns. The parts of a
pass are the model's own functions on its own weights, each compiled alone; what they
leave of a whole step is the loop, norms and cache updates.
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.costs import seconds_a_round
from experiments.suite import Settings
from m2r2_jax import Model, build_method, load
from m2r2_jax.decoding import sampling
from m2r2_jax.decoding.sampling import Sampling
from m2r2_jax.decoding.settings import SamplingParams
from m2r2_jax.files import write_text
from m2r2_jax.models import layers
from m2r2_jax.models.config import Decoder
from m2r2_jax.models.transformer import unembed
from m2r2_jax.ops import compilation, products

_ROWS = (1, 2, 8)
_WIDTHS = (2, 3, 4, 5, 6, 7, 8)
_SLOTS, _REPEATS = 256, 9
_SUM_BYTES = 2 * 512 * 2**20


def run(settings: Settings) -> dict:
    """Prints and stores the parts of a pass, v(n), d, and the bandwidth reached."""
    model = load(settings.model)
    if not model.unrolled:
        raise ValueError(
            "profile measures unrolled models; this one's layers are a stack"
        )
    parts = _part_times(model)
    rounds = _round_times(model)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    record = {
        "experiment": "profile",
        "command": settings.command,
        "model": model.config.name,
        "device_kind": jax.devices()[0].device_kind,
        "dtype": str(model.stream_dtype),
        "bandwidth": parts.pop("bandwidth"),
        "weight_bytes": weights,
        "step_seconds": rounds["step"],
        "weight_bandwidth": weights / rounds["step"],
        "parts": parts,
        **rounds,
    }
    write_text(settings.out / "results.json", json.dumps(record, indent=1) + "\n")
    text = summary(record)
    write_text(settings.out / "results.md", text)
    print(text)
    return record


def _round_times(model: Model) -> dict:
    """A plain step in seconds; v(n) and a round's cost in plain steps."""
    plain = build_method("autoregressive", model)
    wide = [build_method("random_draft", model, length=n - 1) for n in _WIDTHS]
    never, always = (
        build_method("m2r2", model, length=1, min_confidence=confidence)
        for confidence in (1.1, 0.0)
    )
    times = seconds_a_round(model, [plain, *wide, never, always])
    step = times[0]
    return {
        "step": step,
        "v": dict(zip(_WIDTHS, (t / step for t in times[1:-2]), strict=True)),
        # A draft that is never confident is drawn and not verified.
        "d": times[-2] / step - 1,
        "round_of_one_draft": times[-1] / step,
    }


def _part_times(model: Model) -> dict:
    """Seconds of each part by rows, and the bandwidth of a sum over 1 GiB."""
    decoder, config, params = model.decoder, model.config, model.params
    big = jnp.ones((2, _SUM_BYTES // 8), jnp.float32)
    jobs: dict[tuple, Callable] = {("bandwidth",): functools.partial(_sum, big)}
    for rows in _ROWS:
        x_1RD = jnp.ones((1, rows, config.width), model.stream_dtype)
        head = functools.partial(_head, decoder, params, x_1RD)
        jobs["projections", rows] = functools.partial(
            _projections, decoder, params, x_1RD
        )
        jobs["attention", rows] = functools.partial(
            _attention, decoder, *_cache(model, rows)
        )
        jobs["head", rows] = head
        jobs["sampling", rows] = functools.partial(_sampling, decoder, head())
    times: dict[tuple, list[float]] = {name: [] for name in jobs}
    for _ in range(1 + _REPEATS):
        for name, job in jobs.items():
            started = time.perf_counter()
            jax.block_until_ready(job())
            times[name].append(time.perf_counter() - started)
    found: dict = {"bandwidth": big.nbytes / min(times.pop(("bandwidth",))[1:])}
    for (part, rows), taken in times.items():
        found.setdefault(part, {})[rows] = statistics.median(taken[1:])
    return found


_sum = jax.jit(jnp.sum)


@functools.partial(compilation.jit, static_argnames=("decoder",))
def _projections(decoder: Decoder, params: dict, x_1RD: jax.Array) -> jax.Array:
    """The four products of every block, each waiting for the one before."""
    linear = functools.partial(products.linear, execution=decoder.execution)
    for block in params["blocks"]:
        qkv = linear(x_1RD, block["qkv"]).reshape(*x_1RD.shape[:2], -1)
        wide = block["out"].shape[-1]
        x_1RD = x_1RD + linear(qkv[..., :wide], block["out"])
        gate_up = linear(x_1RD, block["gate_up"])
        x_1RD = x_1RD + linear(layers.gated_product(gate_up), block["down"])
    return x_1RD


def _cache(model: Model, rows: int):
    """Queries of a pass, and keys and values of every layer over the slots."""
    config, dtype = model.config, model.stream_dtype
    shape = (config.num_kv_heads, _SLOTS, config.head_dim)
    buffers = [jnp.ones(shape, dtype) for _ in range(2 * config.num_layers)]
    group = (config.num_kv_heads, config.queries_per_kv, config.head_dim)
    mask = np.ones((1, rows, _SLOTS), bool)
    return jnp.ones((1, rows, *group), dtype), buffers, jnp.asarray(mask)


@functools.partial(compilation.jit, static_argnames=("decoder",))
def _attention(decoder: Decoder, q_1RKGH, buffers, mask_1RS) -> jax.Array:
    for keys, values in zip(buffers[::2], buffers[1::2], strict=True):
        mixed = layers.attention(q_1RKGH, keys, values, mask_1RS, decoder.execution)
        q_1RKGH = q_1RKGH + mixed.reshape(q_1RKGH.shape)
    return q_1RKGH


@functools.partial(compilation.jit, static_argnames=("decoder",))
def _head(decoder: Decoder, params: dict, x_1RD: jax.Array) -> jax.Array:
    return unembed(decoder, params, x_1RD)


@functools.partial(compilation.jit, static_argnames=("decoder",))
def _sampling(decoder: Decoder, logits_1RV: jax.Array) -> jax.Array:
    position_1R = jnp.arange(logits_1RV.shape[1])[None]
    return sampling.choose(logits_1RV, Sampling.stack([SamplingParams()]), position_1R)


def summary(record: dict) -> str:
    """The record as Markdown."""
    step = record["step"]
    share = record["weight_bandwidth"] / record["bandwidth"]
    lines = [
        f"# profile: {record['model']}, {record['dtype']} on {record['device_kind']}",
        "",
        f"Plain step {step * 1e3:.1f} ms ({1 / step:.1f} tokens/s): "
        f"{record['weight_bytes'] / 1e6:.0f} MB of weights at "
        f"{record['weight_bandwidth'] / 1e9:.1f} GB/s, {share:.0%} of the "
        f"{record['bandwidth'] / 1e9:.1f} GB/s that a sum over 1 GiB reaches.",
        "",
        "| part, ms | " + " | ".join(f"{n} rows" for n in _ROWS) + " |",
        "|---" * (len(_ROWS) + 1) + "|",
    ]
    for part, times in record["parts"].items():
        cells = (f"{times[rows] * 1e3:.2f}" for rows in _ROWS)
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    known = sum(times[1] for times in record["parts"].values())
    lines += [
        f"| loop, norms, cache | {(step - known) * 1e3:.2f} | - | - |",
        "",
        "Rounds in plain steps: "
        + ", ".join(f"v({n}) {cost:.2f}" for n, cost in record["v"].items())
        + f"; d {record['d']:.2f}; drafting one token and verifying it "
        f"{record['round_of_one_draft']:.2f}.",
    ]
    return "\n".join(lines) + "\n"

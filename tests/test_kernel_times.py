"""Timing of the kernels, as far as it goes without an accelerator."""

import functools

import jax
import numpy as np
import pytest
from conftest import TINY

from experiments import kernels, run
from experiments.kernel_shapes import attention_call, update_call


def test_timing_asks_for_an_accelerator(tmp_path):
    with pytest.raises(ValueError, match="finds only cpu here"):
        run.main(["--exp=kernels", f"--out={tmp_path}"])


@pytest.mark.parametrize(
    "call",
    [
        update_call(TINY, "down", 4, "int8"),
        update_call(TINY, "qkv", 4, "float32"),
        attention_call(TINY, 4, 64, "float32"),
    ],
    ids=lambda call: call.name,
)
def test_kernels_are_timed_every_way(call, monkeypatch):
    monkeypatch.setattr(kernels, "_ROTATED_BYTES", 1)
    row = kernels.measure(call, "interpret")
    assert all(row[f"{way}_seconds"] > 0 for way in ("kernel", "stacked", "apart"))
    arguments = kernels._fill(call.arguments, 0)
    together = jax.jit(functools.partial(call.run, "reference"))(arguments)
    apart = np.concatenate(jax.jit(call.run_apart)(arguments), together.ndim - 2)
    assert np.allclose(together, apart, atol=1e-2)
    record = {
        "device_kind": "cpu",
        "versions": {"jax": "0"},
        "copy_bandwidth": 1e9,
        "kernels": [row, {"program": "b", "error": "no"}],
    }
    assert f"| {call.name} | " in kernels.summary(record)

"""Tests of decoding over two devices, in a process of its own.

The devices are the CPU twice, so this is about placement and values, not about speed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY

SCRIPT = Path(__file__).parent / "decode_on_mesh.py"
CAPACITY = 256
# Mesh, method, batch, temperature.
DATA_CASES = [
    "data:2 plain 2 0",
    "data:2 prompt_lookup 4 0",
    "data:2 early_exit 4 0",
    "data:2 early_exit 4 0.9",
]
MODEL_CASES = ["data:1,model:2 early_exit 2 0"]


@pytest.fixture(scope="module")
def decoded() -> dict:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *DATA_CASES, *MODEL_CASES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", DATA_CASES + MODEL_CASES)
def test_two_devices_give_the_ids_of_plain_decoding_on_one(decoded, case):
    _, _, batch, temperature = case.split(" ")
    found, expected = (
        decoded["cases"][case]["ids"],
        decoded["plain"][temperature]["ids"],
    )
    assert found == [turn[: int(batch)] for turn in expected]
    assert all(len(ids) == 24 for turn in found for ids in turn)
    assert found[0] != found[1]


@pytest.mark.parametrize("case", DATA_CASES)
def test_cache_and_history_are_spread_over_both_devices(decoded, case):
    share = int(case.split(" ")[2]) // 2
    assert decoded["cases"][case]["spread"] == {
        "keys": [[share * TINY.num_kv_heads, CAPACITY, TINY.head_dim]] * 2,
        "history": [[share, CAPACITY]] * 2,
        "length": [[share]] * 2,
    }
    assert decoded["plain"]["0"]["spread"]["history"] == [[4, CAPACITY]]


def test_weights_are_spread_as_the_rules_say(decoded):
    whole = [2, 4, TINY.head_dim, TINY.width]
    assert decoded["cases"][DATA_CASES[0]]["qkv"] == [whole, whole]
    assert decoded["cases"][MODEL_CASES[0]]["qkv"] == [[1, *whole[1:]]] * 2


def test_batch_must_fill_the_data_axis(decoded):
    refusal = decoded["cases"][DATA_CASES[0]]["refusal"]
    assert "batch 3 does not fill the mesh's data axis of 2" in refusal
    assert not decoded["cases"][MODEL_CASES[0]]["refusal"]

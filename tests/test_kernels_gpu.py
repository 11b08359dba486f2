"""The GPU kernels in jax's interpreter, against numpy in double precision."""

import jax
import pytest
from gpu_interpreter import interpreted
from test_kernels import (
    attention_call,
    attention_in_numpy,
    close,
    update_call,
    update_in_numpy,
)

from pallas_kernels import decode_attention, decode_attention_gpu, fast_update

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="GPU kernels need jax 0.10"
)


@pytest.mark.parametrize(
    "case",
    [
        (8, 4, 256, 128, 64, "bfloat16", "bfloat16", "qkv"),
        (5, 2, 192, 128, 16, "bfloat16", "bfloat16", "gate_up"),
        (3, 1, 128, 192, 70, "int8", "bfloat16", "down"),
    ],
    ids=str,
)
def test_fast_update_on_gpu_loads_and_adds_what_it_should(case):
    call = update_call(case)
    with interpreted():
        found = fast_update(**call, implementation="gpu")
    assert close(found, update_in_numpy(call), "bfloat16")


@pytest.mark.parametrize(
    "case",
    [
        (1, 3, 1, 4, 64, 256, "bfloat16", "tree"),
        (2, 5, 2, 2, 32, 192, "bfloat16", "window"),
        (1, 33, 1, 2, 64, 128, "bfloat16", "causal"),
    ],
    ids=str,
)
def test_decode_attention_on_gpu_puts_its_splits_together(case):
    call = attention_call(case)
    config = decode_attention_gpu.Config(block_slots=64, splits=2, steps=2)
    with interpreted():
        found = decode_attention(**call, implementation="gpu", config=config)
    assert close(found, attention_in_numpy(call), "bfloat16")


@pytest.mark.parametrize(
    ("width_in", "width_out", "said"),
    [(100, 128, "inputs 100"), (128, 100, "outputs 100")],
)
def test_fractions_of_a_block_are_refused(width_in, width_out, said):
    case = (4, 2, width_in, width_out, 4, "bfloat16", "bfloat16", "qkv")
    with pytest.raises(NotImplementedError, match=said):
        fast_update(**update_call(case), implementation="gpu")

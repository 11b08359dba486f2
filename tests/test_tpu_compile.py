"""The kernels through the real TPU compiler, and lowered for GPU: no device needed."""

import dataclasses
import importlib.util
import json

import jax
import pytest
from conftest import TINY

from experiments import compiled, run, tpu_compile
from experiments.kernel_shapes import (
    LLAMA_3_8B,
    SMOLLM2,
    attention_call,
    update_call,
)
from experiments.model_programs import model_programs

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
CALLS = [
    update_call(SMOLLM2, "gate_up", 3, "bfloat16"),
    update_call(SMOLLM2, "qkv", 8, "int8"),
    attention_call(SMOLLM2, 5, 512, "bfloat16"),
]


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_kernels_compile_for_tpu_without_moving_a_weight(topology):
    device = compiled.topology_device(topology)
    for program in tpu_compile.kernel_programs(CALLS):
        row = compiled.compile_for(device, program)
        assert row["error"] is None
        assert row["tpu_custom_calls"] >= 1
        # Weights and cache lie in memory as the kernel reads them: what is copied is
        # less than a tenth of the arguments.
        assert row["copied_bytes"] < row["argument_bytes"] / 10
        assert row["roofline_seconds"]["v6e"] < row["roofline_seconds"]["v5e"]


@needs_libtpu
def test_a_run_writes_its_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tpu_compile, "kernel_calls", lambda: CALLS[:1])
    monkeypatch.setattr(tpu_compile, "model_programs", lambda: [])
    record = run.main(["--exp=tpu_compile", f"--out={tmp_path}"])
    assert json.loads((tmp_path / "results.json").read_text()) == record
    assert "| compiled | 1 |" in (tmp_path / "results.md").read_text()
    assert record["topology"] == "v5e:2x2"


@needs_libtpu
def test_an_unknown_topology_is_refused():
    with pytest.raises(ValueError, match="try v5e:2x2"):
        run.main(["--exp=tpu_compile", "--set=topology=v99:2x2"])


def test_a_compiler_s_error_is_part_of_the_record():
    def lower(arguments):
        raise RuntimeError("no room | at all")

    program = compiled.Program("a", lower, {})
    row = compiled.compile_for(jax.devices()[0], program)
    assert row == {"program": "a", "error": "RuntimeError: no room | at all"}


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="see pallas_kernels")
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_kernels_lower_for_gpu(call):
    row = tpu_compile.lower_for_gpu(call)
    assert row["error"] is None
    assert row["kernels"] == 1


def test_what_a_kernel_cannot_serve_on_gpu_is_said():
    row = tpu_compile.lower_for_gpu(update_call(LLAMA_3_8B, "out", 8, "float32"))
    assert row["error"].startswith("NotImplementedError")


def test_copies_and_fingerprints_are_read_from_hlo():
    hlo = (
        "HloModule m\n\nFileNames\n1 {path}\n\n"
        "  %a = bf16[3,8]{{1,0}} parameter(0)\n"
        '  %b = bf16[3,8]{{0,1}} copy(%a), metadata={{op_name="{path}"}}\n'
        "  %c = (s32[]{{}}, u32[]) copy-start(%d)\n"
    )
    texts = [hlo.format(path=path) for path in ("here.py", "there.py")]
    assert compiled.copied_bytes(texts[0]) == 48
    assert len({compiled.fingerprint(text) for text in texts}) == 1
    other = texts[0].replace("bf16", "f32")
    assert compiled.fingerprint(other) != compiled.fingerprint(texts[0])


@needs_libtpu
def test_whole_programs_lower_without_weights():
    device = compiled.topology_device("v5e:2x2")
    programs = model_programs(TINY, dataclasses.replace(TINY, name="another"))
    assert len({program.name for program in programs}) == len(programs)
    for program in programs[:-1]:
        lowered = program.lower(compiled.placed(device, program.arguments)).as_text()
        assert ("kernels" in program.name) == ("tpu_custom_call" in lowered)

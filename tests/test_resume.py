"""`kill -9` in the middle of write, label and train changes nothing."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_chat

from experiments import run
from experiments.held_out import held_out_batches
from m2r2_jax.training.labels import LabelStore

_CODE = "import json, sys; from experiments.run import main\n"
_CODE += "for stage in json.loads(sys.argv[1]): main(stage)"


def stages(model: Path, out: Path) -> dict[str, list[str]]:
    """The whole way from a model to its accelerators, as command lines."""
    common = [f"--model={model}"]
    return {
        "write": [
            *("--exp=write", *common, f"--out={out}/write", "--limit=80"),
            *("--set=shard=8", "--set=rows=4", "--set=max_answer_tokens=60"),
            *("--set=max_prompt_tokens=20", "--set=dataset=false"),
        ],
        "label": [
            *("--exp=label", *common, f"--out={out}/label"),
            *(f"--data={out}/write/shards", "--set=row_length=128", "--set=batch=1"),
        ],
        "train": [
            *("--exp=train", *common, f"--out={out}/train", f"--data={out}/label"),
            *("--set=batch=2", "--set=epochs=3", "--set=rank=4", "--set=head=200"),
            *("--set=checkpoint_every=5", "--set=evaluate_every=20"),
        ],
    }


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    return tiny_chat.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def undisturbed(gguf, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    for arguments in stages(gguf, out).values():
        run.main(arguments)
    return out


def begun(stage: str, out: Path) -> bool:
    """Whether a stage has something to lose and something left to do."""
    if stage == "write":
        return 1 <= len(list(out.glob("write/shards/*.jsonl"))) < 10
    if stage == "label":
        path = out / "label" / "labels.json"
        return path.is_file() and json.loads(path.read_text())["rows_done"] > 2
    steps = [int(p.name) for p in out.glob("train/checkpoints/*") if p.name.isdigit()]
    return bool(steps)


def kill_in(stage: str, commands: list[list[str]], out: Path) -> None:
    """Runs commands until the stage has begun, and kills the process there."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE, json.dumps(commands)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 300
    while not begun(stage, out):
        assert process.poll() is None, f"ended before {stage} had begun"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_killed_runs_end_with_the_same_bytes(gguf, undisturbed, tmp_path):
    by_name = stages(gguf, tmp_path)
    commands = list(by_name.values())
    kill_in("write", commands[:1], tmp_path)
    assert len(list(tmp_path.glob("write/shards/*.jsonl"))) < 10
    kill_in("label", commands[:2], tmp_path)
    assert json.loads((tmp_path / "label/labels.json").read_text())["rows_done"] < len(
        LabelStore(undisturbed / "label").packed
    )
    kill_in("train", commands, tmp_path)
    assert not (tmp_path / "train/accelerators.safetensors").exists()
    run.main(by_name["train"])

    def files(pattern):
        return {p.name: p.read_bytes() for p in sorted(tmp_path.glob(pattern))}, {
            p.name: p.read_bytes() for p in sorted(undisturbed.glob(pattern))
        }

    for pattern in ("write/shards/*", "label/*.bf16", "label/*.int32", "label/*.npy"):
        killed, whole = files(pattern)
        assert killed == whole and whole
    assert _tensors(tmp_path) == _tensors(undisturbed)
    logs = [_log(tmp_path), _log(undisturbed)]
    assert logs[0] == logs[1]


def _tensors(out: Path) -> dict[str, bytes]:
    from safetensors.numpy import load_file

    found = load_file(out / "train" / "accelerators.safetensors")
    return {name: np.ascontiguousarray(t).tobytes() for name, t in found.items()}


def _log(out: Path) -> list[dict]:
    rows = [json.loads(line) for line in (out / "train/log.jsonl").open()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def test_folders_of_another_run_are_not_mixed_in(gguf, undisturbed):
    by_name = stages(gguf, undisturbed)
    with pytest.raises(ValueError, match="text written with other settings"):
        run.main([*by_name["write"], "--seed=1"])
    with pytest.raises(ValueError, match="holds another training"):
        run.main([*by_name["train"], "--set=epochs=4"])


def test_writing_goes_on_behind_what_was_written(gguf, undisturbed, tmp_path):
    arguments = stages(gguf, tmp_path)["write"]
    run.main([*arguments, "--limit=4", "--set=first=76"])
    shards = sorted((undisturbed / "write" / "shards").glob("*.jsonl"))
    last = shards[-1].read_text().splitlines()[4:]
    (found,) = (tmp_path / "write" / "shards").glob("*.jsonl")
    assert found.name == "0000076-4.jsonl"
    assert found.read_text().splitlines() == last
    run.main([*arguments, "--limit=6", "--set=first=76"])
    (found,) = (tmp_path / "write" / "shards").glob("*.jsonl")
    assert found.name == "0000076-6.jsonl"


def test_prompts_of_a_file_are_answered(gguf, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    texts = ["hello", "what is it", "x" * 50]
    lines = [json.dumps({"id": str(i), "prompt": text}) for i, text in enumerate(texts)]
    prompts.write_text("\n".join(lines))
    arguments = stages(gguf, tmp_path)["write"]
    run.main([*arguments, f"--data={prompts}"])
    (found,) = (tmp_path / "write" / "shards").glob("*.jsonl")
    rows = [json.loads(line) for line in found.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == texts[:2]


def test_a_training_leaves_its_recipe_log_and_curve(undisturbed):
    folder = undisturbed / "train"
    record = json.loads((folder / "results.json").read_text())
    assert record["held_out"]["tau"] >= 1
    assert "--exp=train" in record["command"] and record["tokens"] > 0
    assert (folder / "curve.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["write", "label", "train"])
def test_unknown_options_list_the_known_ones(name, gguf, tmp_path):
    arguments = [f"--exp={name}", f"--model={gguf}", f"--out={tmp_path}"]
    with pytest.raises(ValueError, match="--set nonsense=...: known are"):
        run.main([*arguments, "--set=nonsense=1"])


def test_nothing_optional_is_imported_before_it_is_used():
    code = (
        "import sys\n"
        "for name in ('tensorflow_datasets', 'matplotlib', 'gguf'):\n"
        "    sys.modules[name] = None\n"
        "import experiments.write, experiments.label, experiments.train"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_held_out_labels_cut_short_are_finished(tmp_path):
    """A kill while held-out answers are labelled must not leave zeros to be read."""
    model = tiny_chat.chat_model()
    whole = held_out_batches(model, tmp_path)
    path = tmp_path / "labels.json"
    states = (tmp_path / "states.bf16").read_bytes()
    path.write_text(json.dumps({**json.loads(path.read_text()), "rows_done": 4}))
    row = len(states) // len(LabelStore(tmp_path).packed)
    (tmp_path / "states.bf16").write_bytes(states[: 4 * row].ljust(len(states), b"\0"))
    again = held_out_batches(model, tmp_path)
    assert (tmp_path / "states.bf16").read_bytes() == states
    assert len(again) == len(whole)

"""The command line and the experiment behind it."""

import json
import subprocess
import sys
import time

import pytest
import tiny_chat

from experiments import (
    correctness,
    costs,
    decoding_speed,
    profile,
    run,
    suite,
)
from experiments.progress import Progress
from experiments.prompts import Prompt
from experiments.report import summary
from m2r2_jax import METHODS

SMALL = ["--exp=mtbench", "--limit=2", "--max_new_tokens=6"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    """A model whose context holds the embedded prompts, byte by byte."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return f"--model={tiny_chat.write_gguf(path, context_length=2048)}"


def test_method_names_of_the_command_line_are_the_library_s():
    assert set(suite.METHOD_NAMES) == set(METHODS)


def test_help_answers_in_under_a_second_and_imports_no_jax():
    code = (
        "import sys, experiments.run as r\n"
        "try: r.main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('jax' in sys.modules)"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert time.perf_counter() - started < 1
    assert done.returncode == 0
    assert "mtbench" in done.stdout


@pytest.mark.parametrize(
    ("argument", "listed"),
    [
        ("--exp=nonsense", "mtbench"),
        ("--methods=autoregressive,nonsense", "prompt_lookup"),
        ("--limit=-1", "-1"),
        ("--set=exact", "key=value"),
    ],
)
def test_wrong_arguments_list_the_choices(capsys, argument, listed):
    with pytest.raises(SystemExit):
        run.parse(["--exp=mtbench", argument])
    assert listed in capsys.readouterr().err


@pytest.mark.parametrize("override", ["rubbish=1", "m2r2.length=x", "exact=maybe"])
def test_unknown_settings_are_refused(override, tmp_path):
    with pytest.raises(ValueError, match="known are"):
        run.main([*SMALL, f"--set={override}", f"--out={tmp_path}"])


def test_a_run_writes_its_record(tiny, tmp_path, capsys):
    arguments = [*SMALL, tiny, "--methods=all", "--set=exact=true", f"--out={tmp_path}"]
    record = run.main(arguments)
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored == record
    rows = {row["method"]: row for row in record["methods"]}
    assert set(rows) == {*METHODS, "autoregressive_exact"}
    assert record["num_prompts"] == 2
    for name, row in rows.items():
        if name != "autoregressive":
            assert row["identical_to_autoregressive"], name
        assert row["turns"] == 4
        assert row["tokens"] > 0
        assert row["seconds"] > 0
        assert row["peak_memory_bytes"] > 1e8
    assert rows["autoregressive"]["speedup"] == 1
    assert rows["autoregressive"]["tau"] == 1
    assert rows["early_exit"]["trainable_parameters"] == 0
    answers = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert len(answers) == 4 * len(rows)
    for line in answers:
        answer = json.loads(line)
        assert sum(answer["accepted_lengths"]) == len(answer["token_ids"])
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    assert "untrained" in (tmp_path / "results.md").read_text()
    assert not (tmp_path / "progress.jsonl").exists()
    assert "speed-up" in capsys.readouterr().out


def test_a_killed_run_resumes_and_gives_the_same_answers(tiny, tmp_path, monkeypatch):
    arguments = [*SMALL, tiny, "--methods=autoregressive", f"--out={tmp_path}"]
    original = decoding_speed.Runner.run_group
    ran = []

    def dies_at_the_second(self, group, index, bar):
        if len(ran) == 1:
            raise KeyboardInterrupt
        ran.append(index)
        return original(self, group, index, bar)

    monkeypatch.setattr(decoding_speed.Runner, "run_group", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run.main(arguments)
    # The line that was being written when the power went.
    with open(tmp_path / "progress.jsonl", "a") as file:
        file.write('{"identity": "cut of')

    def counts(self, group, index, bar):
        ran.append(index)
        return original(self, group, index, bar)

    monkeypatch.setattr(decoding_speed.Runner, "run_group", counts)
    run.main(arguments)
    assert ran == [0, 1]
    answers = (tmp_path / "answers.jsonl").read_text().splitlines()
    whole = [*SMALL, tiny, "--methods=autoregressive", f"--out={tmp_path / 'whole'}"]
    run.main(whole)
    expected = (tmp_path / "whole" / "answers.jsonl").read_text().splitlines()
    without_seconds = [
        [{**json.loads(line), "seconds": 0} for line in lines]
        for lines in (answers, expected)
    ]
    assert without_seconds[0] == without_seconds[1]


def test_progress_of_another_run_does_not_count(tmp_path):
    path, group = tmp_path / "progress.jsonl", [Prompt("a", "", ("hi",))]
    Progress(path, {"max_new_tokens": 8}).add(group, [])
    assert Progress(path, {"max_new_tokens": 9}).get(group) is None
    Progress(path, {"max_new_tokens": 8}).add(group, [])
    assert Progress(path, {"max_new_tokens": 8}).get(group) == []


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_record_is_not_written_over_a_file(below, tmp_path, capsys):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(SystemExit):
        run.main(["--exp=mtbench", f"--out={file / below}"])
    assert f"{str(file)!r} is a file; name a folder" in capsys.readouterr().err
    assert file.read_text() == "mine"


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.gguf"):
        run.main([*SMALL, "--model=missing.gguf", f"--out={tmp_path}"])


def test_a_method_that_slows_decoding_down_is_said_to():
    common = {"tau": 1.0, "tau_without_loops": 1.0, "note": "", "turns": 1}
    common |= {"divergences": [], "peak_memory_bytes": 1, "compile_seconds": 1.0}
    methods = [
        {"method": name, "speedup": speed, "acceptance_by_position": rates} | common
        for name, speed, rates in [
            ("autoregressive", 1.0, []),
            ("good", 1.2, [0.5]),
            ("bad", 0.8, [0.1]),
        ]
    ]
    for method in methods:
        method["tokens_per_second"] = 10 * method["speedup"]
    record = dict.fromkeys(
        ("experiment", "model", "prompts", "command", "dtype", "device_kind", "mesh"),
        "x",
    )
    record |= {"num_prompts": 1, "max_new_tokens": 1, "temperature": 0.0}
    record |= {"versions": {"jax": "1"}, "reference": "x", "methods": methods}
    lines = [line for line in summary(record).splitlines() if "slower" in line]
    assert lines == [
        "bad: slower than plain decoding here; its drafts cost more than they save."
    ]


FEW = ["--methods=autoregressive,prompt_lookup", "--max_new_tokens=40"]


def test_batches_hold_rows_against_their_single_runs(tiny, tmp_path):
    arguments = ["--exp=batches", "--limit=2", "--set=sizes=1,2", tiny, *FEW]
    record = run.main([*arguments, f"--out={tmp_path}"])
    assert [(row["batch"], row["method"]) for row in record["rows"]] == [
        (size, name) for size in (1, 2) for name in ("autoregressive", "prompt_lookup")
    ]
    assert record["exact"] == {"autoregressive": "2 of 2", "prompt_lookup": "2 of 2"}
    assert (tmp_path / "results.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="1 prompts do not fill batches of 2"):
        run.main(["--exp=batches", "--limit=1", "--set=sizes=1,2", tiny, *FEW])


def test_correctness_lists_where_answers_part(tiny, tmp_path, monkeypatch):
    def answers(model, settings, exact, prompts, name):
        shared = [5, 6, 7, 8]
        return [shared if name == "autoregressive" else [5, 6, 9, 8] for _ in prompts]

    monkeypatch.setattr(correctness, "_answers", answers)
    record = run.main(
        ["--exp=correctness", "--limit=1", tiny, *FEW, f"--out={tmp_path}"]
    )
    for row in record["rows"]:
        (divergence,) = row["divergences"]
        assert divergence["token"] == 2 and divergence["margin"] > 0
        assert row["ties"] == (divergence["margin"] <= correctness.TIE[row["mode"]])
    assert "0 of 1" in (tmp_path / "results.md").read_text()


def test_profile_prints_parts_costs_and_bandwidth(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(profile, "_REPEATS", 1)
    monkeypatch.setattr(profile, "_SUM_BYTES", 2**24)
    monkeypatch.setattr(profile, "_WIDTHS", (2,))
    monkeypatch.setattr(costs, "_REPEATS", 1)
    monkeypatch.setattr(costs, "_ROUNDS", 2)
    record = run.main(["--exp=profile", tiny, f"--out={tmp_path}"])
    assert set(record["parts"]) == {"projections", "attention", "head", "sampling"}
    assert all(seconds > 0 for p in record["parts"].values() for seconds in p.values())
    assert record["v"][2] > 0 and record["weight_bytes"] > 1e5
    assert "GB/s that a sum over 1 GiB reaches" in capsys.readouterr().out

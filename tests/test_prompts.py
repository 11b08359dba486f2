"""Prompt suites: the embedded one and the readers of published formats."""

import json
from collections import Counter

import pytest

from experiments.prompts import SUITES, load_prompts


def test_embedded_suite_is_whole_and_its_first_eight_cover_all_categories():
    prompts = load_prompts("embedded", None, None)
    assert len({prompt.id for prompt in prompts}) == 80
    assert set(Counter(prompt.category for prompt in prompts).values()) == {10}
    assert len({prompt.category for prompt in prompts[:8]}) == 8
    assert all(len(prompt.turns) == 2 for prompt in prompts)


@pytest.mark.parametrize(
    ("suite", "row", "turns"),
    [
        ("mt_bench", {"question_id": 81, "category": "c", "turns": ["a", "b"]}, "a b"),
        ("koala", {"id": "k", "prompt": "a"}, "a"),
        ("wizardlm", {"idx": 1, "Skill": "Math", "Instruction": "a"}, "a"),
        (
            "self_instruct",
            {
                "id": "s",
                "motivation_app": "m",
                "instruction": "a",
                "instances": [{"input": "b", "output": "c"}],
            },
            "a b",
        ),
    ],
)
def test_published_formats(tmp_path, suite, row, turns):
    (tmp_path / f"{suite}.jsonl").write_text(json.dumps(row) + "\n")
    (prompt,) = load_prompts(suite, tmp_path, None)
    assert " ".join(prompt.turns).split() == turns.split()
    (detected,) = load_prompts(str(tmp_path / f"{suite}.jsonl"), None, None)
    assert detected == prompt


def test_limit_takes_the_first(tmp_path):
    lines = [json.dumps({"id": i, "prompt": f"p{i}"}) for i in range(5)]
    (tmp_path / "koala.jsonl").write_text("\n".join(lines))
    prompts = load_prompts("koala", tmp_path, 2)
    assert [prompt.turns for prompt in prompts] == [("p0",), ("p1",)]


def test_missing_things_are_named(tmp_path):
    with pytest.raises(ValueError, match="embedded, mt_bench"):
        load_prompts("nonsense", None, None)
    with pytest.raises(ValueError, match="--data_dir"):
        load_prompts("koala", None, None)
    with pytest.raises(FileNotFoundError, match=r"koala\.jsonl"):
        load_prompts("koala", tmp_path, None)
    with pytest.raises(FileNotFoundError, match=r"mine\.jsonl"):
        load_prompts("mine.jsonl", None, None)


@pytest.mark.parametrize(
    "line", ["{", "[1]", '{"id": 1}', '{"id": 1, "turns": [" "]}', '{"turns": []}']
)
def test_malformed_rows_name_file_and_line(tmp_path, line):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"id": 0, "prompt": "fine"}\n' + line)
    with pytest.raises(ValueError, match=r"mine\.jsonl, line 2"):
        load_prompts(str(path), None, None)


def test_a_prompt_may_hold_line_separators(tmp_path):
    path = tmp_path / "mine.jsonl"
    row = {"id": 0, "prompt": "a\u2028b\x85c"}
    path.write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
    (prompt,) = load_prompts(str(path), None, None)
    assert prompt.turns == (row["prompt"],)


def test_an_empty_file_is_an_error(tmp_path):
    (tmp_path / "mine.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no prompt"):
        load_prompts(str(tmp_path / "mine.jsonl"), None, None)


def test_every_suite_has_a_reader():
    assert all(callable(reader) for reader in SUITES.values())

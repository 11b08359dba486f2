"""Prompts composed of task forms: what they are, and what is never among them."""

import json
import random

import pytest
import tiny_chat

from experiments import run, task_prompts
from experiments.prompts import load_prompts
from experiments.task_prompts import compose, fitting


def test_a_prompt_is_a_function_of_the_seed_and_its_number():
    some = [compose(3, number) for number in range(50)]
    assert [compose(3, number) for number in reversed(range(50))] == some[::-1]
    assert len({*some, *(compose(4, number) for number in range(50))}) == 100
    # Known ones: other words, forms or draws make other text of the same seed.
    assert compose(0, 2) == "Give eight unusual uses for a compass."


def test_no_held_out_prompt_is_composed_and_few_come_twice():
    composed = [compose(0, number) for number in range(50_000)]
    text = "\n\n".join(composed)
    held_out = [turn for p in load_prompts("embedded", None, None) for turn in p.turns]
    assert len(held_out) == 160
    assert not [turn for turn in held_out if turn in text]
    assert len(set(composed)) > 47_000


@pytest.mark.parametrize("kind", task_prompts._kinds())
def test_every_form_can_be_filled(kind):
    for form in task_prompts._forms()[kind]:
        for seed in range(5):
            text = task_prompts._Filling(random.Random(seed).random).fill(form)
            assert not task_prompts._SLOT.search(text.replace("{passage}", "")), form


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("{noun.1} {noun.1}", 1),
        ("{noun.1} {noun.2}", 2),
        (" ".join(["{season}"] * 4), 4),
        (" ".join(["{7..7}"] * 3), 1),
    ],
)
def test_slots_are_drawn_anew_unless_they_share_a_label(form, expected):
    for seed in range(20):
        text = task_prompts._Filling(random.Random(seed).random).fill(form)
        assert len(set(text.split())) == expected


def test_a_prompt_that_is_too_long_gives_way_to_another():
    limits = [len(compose(0, number)) - 1 for number in range(8)]
    found = [fitting(0, n, list, max(30, limit)) for n, limit in enumerate(limits)]
    for number, ids in enumerate(found):
        assert len(ids) <= max(30, limits[number])
        assert "".join(ids) != compose(0, number)
        assert fitting(0, number, list, 10**6) == list(compose(0, number))
    with pytest.raises(ValueError, match="max_prompt_tokens 5 is too low"):
        fitting(0, 0, list, 5)


def test_the_model_answers_task_prompts_by_their_numbers(tmp_path):
    model = tiny_chat.write_gguf(tmp_path / "tiny.gguf")
    arguments = [
        *("--exp=write", f"--model={model}", "--set=prompts=tasks", "--set=rows=4"),
        *("--set=max_prompt_tokens=60", "--set=max_answer_tokens=9"),
        *("--set=dataset=false", "--seed=2"),
    ]

    def prompts(name, *more):
        run.main([*arguments, f"--out={tmp_path / name}", *more])
        (shard,) = (tmp_path / name / "shards").glob("*.jsonl")
        return [json.loads(line)["prompt"] for line in shard.read_text().splitlines()]

    whole = prompts("whole", "--limit=6")
    encode = tiny_chat.chat_model().tokenizer.encode
    decode = tiny_chat.chat_model().tokenizer.decode
    assert whole == [decode(fitting(2, number, encode, 60)) for number in range(6)]
    assert prompts("rest", "--limit=2", "--set=first=4") == whole[4:]
    with pytest.raises(ValueError, match="text written with other settings"):
        prompts("whole", "--limit=6", "--set=prompts=own")
    with pytest.raises(ValueError, match="prompts=mine: choose own or tasks"):
        prompts("whole", "--limit=6", "--set=prompts=mine")

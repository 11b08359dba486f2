"""Tests of rows that take the next prompt when their answer has ended."""

import dataclasses

import pytest
from conftest import NEVER, PLAIN, TINY, TINY_METHODS, run_one
from test_requests import Spelling

from m2r2_jax.decoding.settings import SamplingParams
from m2r2_jax.ops.compilation import CompileClock
from m2r2_jax.serving.slots import answer_all

PROMPTS = [
    [5, 17, 42, 3],
    [1, 1, 1],
    [*range(100, 140)],
    [7, 8, 9, 7, 8, 9, 7],
    [200],
    [*range(30)],
    [3, 1, 4, 1, 5],
]
every_method = pytest.mark.parametrize(
    "method", TINY_METHODS.values(), ids=TINY_METHODS
)


@every_method
@pytest.mark.parametrize("batch", [1, 3])
def test_answers_are_those_of_single_runs(tiny_model, method, batch):
    ends = frozenset(run_one(tiny_model, PLAIN, PROMPTS[0], 9).token_ids[5:7])
    settings = {"eos_ids": ends, "logprobs": True}
    found = dict(answer_all(tiny_model, method, PROMPTS, 40, batch=batch, **settings))
    assert sorted(found) == list(range(len(PROMPTS)))
    for index, prompt in enumerate(PROMPTS):
        alone = run_one(tiny_model, PLAIN, prompt, 40, **settings)
        assert found[index].token_ids == alone.token_ids
        assert found[index].finish_reason == alone.finish_reason
        assert found[index].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert len({len(answer.token_ids) for answer in found.values()}) > 2


@every_method
def test_sampling_and_stop_strings_hold_for_every_row(tiny_model, method):
    model = dataclasses.replace(tiny_model, tokenizer=Spelling())
    how = SamplingParams(temperature=0.9, presence_penalty=0.4, seed=2)
    settings = {"sampling": how, "stop": ["a c", "e"], "eos_ids": NEVER}
    found = dict(answer_all(model, method, PROMPTS, 30, batch=2, **settings))
    for index, prompt in enumerate(PROMPTS):
        settings["sampling"] = how.for_prompt(index)
        alone = run_one(model, PLAIN, prompt, 30, **settings)
        assert found[index].token_ids == alone.token_ids
        assert found[index].stopped_at == alone.stopped_at


def test_equal_prompts_of_a_sampled_batch_get_answers_of_their_own(tiny_model):
    how = SamplingParams(temperature=1.0, seed=4)
    found = dict(
        answer_all(tiny_model, PLAIN, [PROMPTS[0]] * 4, 12, batch=2, sampling=how)
    )
    assert len({tuple(answer.token_ids) for answer in found.values()}) == 4
    for index in range(2):
        alone = {"temperature": 1.0, "seed": how.for_prompt(index).seed}
        expected = run_one(tiny_model, PLAIN, PROMPTS[0], 12, **alone)
        assert found[index].token_ids == expected.token_ids


def test_stop_strings_of_a_generator_serve_all_prompts(tiny_model):
    model = dataclasses.replace(tiny_model, tokenizer=Spelling())
    for stop in (["a", "e"], (string for string in ("a", "e"))):
        found = dict(answer_all(model, PLAIN, PROMPTS[:3], 12, batch=1, stop=stop))
        assert all(answer.stopped_at is not None for answer in found.values())


def test_errors_name_the_prompt(tiny_model):
    others = dict.fromkeys(range(1, TINY.vocab_size), -float("inf")) | {0: -100.0}
    how = SamplingParams(logit_bias=others, presence_penalty=1e6)
    prompts = [[1] * 246, [1, 2, 3]]  # The first has room for a single token.
    settings = {"batch": 1, "sampling": how, "truncate": "answer"}
    with pytest.raises(ValueError, match="leave no token at position 4 of row 1"):
        list(answer_all(tiny_model, PLAIN, prompts, 2, **settings))
    with pytest.raises(ValueError, match="prompt 2 is empty"):
        answer_all(tiny_model, PLAIN, [[1], [2], []], 2)


def test_refilling_compiles_nothing_after_the_first_round(tiny_model):
    method = TINY_METHODS["m2r2"]
    list(answer_all(tiny_model, method, PROMPTS, 20, batch=2))
    clock = CompileClock()
    list(answer_all(tiny_model, method, PROMPTS[::-1] * 2, 20, batch=2))
    assert clock.count == 0


def test_mistakes_are_refused_before_any_work(tiny_model):
    assert list(answer_all(tiny_model, PLAIN, [], 5)) == []
    with pytest.raises(ValueError, match="batch 0 must be at least 1"):
        answer_all(tiny_model, PLAIN, PROMPTS, 5, batch=0)
    with pytest.raises(ValueError, match="the context holds 247"):
        answer_all(tiny_model, PLAIN, [*PROMPTS, [1] * TINY.context_length], 5)

"""Tests of `generate` with the default model, on answers of a few tokens."""

import pytest

import m2r2_jax
from m2r2_jax import generation
from m2r2_jax.generation import Generation, encode_prompt, generate


@pytest.fixture(autouse=True)
def loaded_once(default_model, monkeypatch):
    """The model that `generate` loads by itself is the one of the other tests."""
    monkeypatch.setattr(generation, "_default_model", lambda: default_model)


def test_text_in_text_out_and_nothing_printed(capfd):
    text = generate("Hi", max_new_tokens=8)
    assert isinstance(text, str) and text
    assert "<|" not in text
    assert capfd.readouterr() == ("", "")


def test_details_agree_with_each_other(default_model):
    result = generate("Hi", default_model, max_new_tokens=8, details=True)
    assert isinstance(result, Generation)
    assert result.text == generate("Hi", default_model, max_new_tokens=8)
    assert result.text == default_model.tokenizer.decode(result.token_ids)
    assert 0 < len(result.token_ids) <= 8
    stopped = result.token_ids[-1] in default_model.tokenizer.eos_ids
    assert result.finish_reason == ("stop" if stopped else "length")
    assert stopped or len(result.token_ids) == 8
    assert result.prompt_tokens == len(encode_prompt(default_model, "Hi"))
    assert result.method == generation.DEFAULT_METHOD
    assert result.tau >= 1
    assert result.prefill_seconds > 0 and result.decode_seconds > 0


def test_end_of_turn_ends_an_answer_and_is_not_shown(default_model):
    question = "What is the capital of France?"
    result = generate(question, default_model, max_new_tokens=20, details=True)
    assert result.text == "The capital of France is Paris."
    assert result.finish_reason == "stop"
    assert result.token_ids[-1] in default_model.tokenizer.eos_ids


def test_conversation_continues_from_its_turns(default_model):
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
        {"role": "user", "content": "And of Italy?"},
    ]
    result = generate(messages, default_model, max_new_tokens=12, details=True)
    assert "Rome" in result.text
    assert result.prompt_tokens == len(default_model.tokenizer.encode_chat(messages))
    single = [messages[0]]
    assert encode_prompt(default_model, single) == encode_prompt(
        default_model, single[0]["content"]
    )


def test_no_new_tokens_is_an_empty_answer(default_model):
    result = generate("Hi", default_model, max_new_tokens=0, details=True)
    assert (result.text, result.token_ids, result.tau) == ("", [], None)
    assert result.finish_reason == "length"


def test_seed_decides_a_sampled_text(default_model):
    settings = {"max_new_tokens": 12, "temperature": 1.0}
    texts = [generate("Hi", default_model, seed=s, **settings) for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ("", {}, "prompt is empty"),
        (" \n", {}, "prompt is empty"),
        ([], {}, "messages is"),
        ([{"role": "user"}], {}, "message 0"),
        (
            "Hi",
            {"method": "medusa2"},
            "choose from autoregressive, early_exit, m2r2",
        ),
        ("Hi", {"max_new_tokens": -1}, "max_new_tokens -1"),
        ("Hi", {"temperature": -1.0}, "temperature -1.0"),
        ("word " * 9000, {}, "the context holds 8192"),
    ],
)
def test_mistakes_are_refused(default_model, prompt, settings, message):
    with pytest.raises(ValueError, match=message):
        generate(prompt, default_model, **settings)


def test_public_names_are_what_is_documented():
    assert all(hasattr(m2r2_jax, name) for name in m2r2_jax.__all__)
    assert {"generate", "load", "Session", "build_method"} <= set(m2r2_jax.__all__)

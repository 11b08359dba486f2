"""Tests of `generate` with the default model, on answers of a few tokens."""

import dataclasses

import pytest

import m2r2_jax
from m2r2_jax import chat
from m2r2_jax.serving import generation
from m2r2_jax.serving.generation import (
    Generation,
    generate,
    generate_many,
    stream_generate,
)
from m2r2_jax.serving.prompts import encode_prompt


@pytest.fixture(autouse=True)
def loaded_once(default_model, monkeypatch):
    """The model that `generate` loads by itself is the one of the other tests."""
    monkeypatch.setattr(generation, "default_model", lambda: default_model)


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


def test_pieces_of_a_stream_join_to_the_text(default_model):
    settings = {"max_new_tokens": 40, "method": "m2r2"}
    pieces = list(stream_generate("Count to five.", default_model, **settings))
    whole = generate("Count to five.", default_model, details=True, **settings)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [id for piece in pieces for id in piece.token_ids] == whole.token_ids
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == whole.finish_reason
    assert len(pieces) > 2


def test_a_stream_never_shows_the_beginning_of_its_stop_string(default_model):
    question = "What is the capital of France?"
    for stop in (["is Paris"], ["of Fra", "Paris."], ["nowhere"], ["The"]):
        whole = generate(question, default_model, stop=stop, details=True)
        pieces = list(stream_generate(question, default_model, stop=stop))
        assert "".join(piece.text for piece in pieces) == whole.text
        assert whole.finish_reason == pieces[-1].finish_reason == "stop"
        assert not any(s in whole.text for s in stop)
    assert generate(question, default_model, stop=["is Paris"]) == (
        "The capital of France "
    )


def test_log_probabilities_come_with_the_ids(default_model):
    settings = {"max_new_tokens": 10, "details": True, "logprobs": True}
    drafted, plain = (
        generate("Hi", default_model, method=method, **settings)
        for method in ("m2r2", "autoregressive")
    )
    assert len(drafted.logprobs) == len(drafted.token_ids)
    assert drafted.logprobs == pytest.approx(plain.logprobs, abs=1e-3)
    assert -3 < max(drafted.logprobs) <= 0


def test_many_prompts_are_answered_in_their_order(default_model):
    questions = ["What is the capital of France?", "Hi", "Name a colour."]
    settings = {"max_new_tokens": 12, "method": "autoregressive"}
    answers = generate_many(questions, default_model, batch=2, **settings)
    assert answers == [generate(q, default_model, **settings) for q in questions]


def test_a_chat_remembers_and_equals_the_conversation_written_out(default_model):
    talk = chat(default_model)
    first = talk.send("What is the capital of France?", 20)
    assert first == "The capital of France is Paris."
    second = talk.send("And of Italy?", 12)
    assert second == generate(talk.messages[:-1], default_model, max_new_tokens=12)
    assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 2


def test_a_chat_goes_on_after_an_answer_that_was_not_taken_to_its_end(default_model):
    talk = chat(default_model, system="You are brief.", method="m2r2")
    stream = talk.stream("Tell me about the sea.", 60)
    given = next(stream).text + next(stream).text
    stream.close()
    assert talk.messages[-1] == {"role": "assistant", "content": given}
    answer = talk.send("Go on.", 12)
    assert answer == generate(talk.messages[:-1], default_model, max_new_tokens=12)


def test_a_refused_turn_leaves_a_chat_as_it_was(default_model):
    talk = chat(default_model)
    for text, settings, message in [
        (" ", {}, "is empty"),
        (7, {}, "is empty"),
        ("Hi", {"top_p": 2.0}, "top_p 2.0"),
        ("Hi", {"max_new_tokens": 9000}, "the context holds 8192"),
    ]:
        with pytest.raises(ValueError, match=message):
            talk.send(text, **settings)
    assert talk.messages == []


def test_a_model_without_a_template_cannot_chat(default_model):
    class Plain:
        has_chat_template = False

    model = dataclasses.replace(default_model, tokenizer=Plain())
    with pytest.raises(ValueError, match="has no chat template; use generate"):
        chat(model)


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ("", {}, "prompt is empty"),
        (" \n", {}, "prompt is empty"),
        ([], {}, "messages is"),
        (5, {}, "messages is 5"),
        (None, {}, "messages is None"),
        ([{"role": "user"}], {}, "message 0"),
        (
            "Hi",
            {"method": "medusa2"},
            "choose from autoregressive, early_exit, m2r2",
        ),
        ("Hi", {"max_new_tokens": -1}, "max_new_tokens -1"),
        ("Hi", {"temperature": -1.0}, "temperature -1.0"),
        ("word " * 9000, {}, "the context holds 8192"),
        ("Hi", {"max_new_tokens": 8192}, "8192 new ones, the context holds 8192"),
    ],
)
def test_mistakes_are_refused(default_model, prompt, settings, message):
    with pytest.raises(ValueError, match=message):
        generate(prompt, default_model, **settings)


def test_public_names_are_what_is_documented():
    assert all(hasattr(m2r2_jax, name) for name in m2r2_jax.__all__)
    assert {"generate", "load", "Session", "build_method"} <= set(m2r2_jax.__all__)

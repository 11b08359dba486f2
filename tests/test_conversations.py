"""Conversations with a tiny model: what is remembered, what gives way, how they end."""

import functools

import pytest
import tiny_chat

from m2r2_jax import chat
from m2r2_jax.checkpoints.model import Model
from m2r2_jax.serving.generation import generate, generate_many, stream_generate
from m2r2_jax.serving.prompts import encode_prompt, fitted_prompt

START = "<|im_start|>"
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_chat.chat_model()


@pytest.fixture(scope="module")
def whole(model):
    """An answer with a control token in its middle, and the seed it comes with."""
    control = model.tokenizer.encode(START, special=True)[0]
    bias = {"logit_bias": {control: 3.0}, "temperature": 1.0, "max_new_tokens": 24}
    for seed in range(50):
        found = generate("hi", model, seed=seed, details=True, **bias)
        if control in found.token_ids[3:-3] and len(found.text) > 12:
            return {**bias, "seed": seed}, found, found.token_ids.index(control)
    raise AssertionError("no answer with a control token")


def test_the_spelling_of_a_control_token_ends_the_answer_at_it(model, whole):
    settings, full, at = whole
    found = generate("hi", model, stop=[START], details=True, **settings)
    assert found.token_ids == full.token_ids[: at + 1]
    assert found.text == model.tokenizer.decode(full.token_ids[:at])
    assert found.finish_reason == "stop"


def test_a_stop_string_may_begin_and_end_beside_a_control_token(model, whole):
    settings, full, at = whole
    decode = functools.partial(model.tokenizer.decode, skip_special=False)
    after = next(
        count
        for count in range(at + 2, len(full.token_ids) + 1)
        if not decode(full.token_ids[at + 1 : count]).endswith("\ufffd")
    )
    for start in (at - 1, at):
        stop = decode(full.token_ids[start:after])
        asked = {"stop": ["nowhere", stop], **settings}
        found = generate("hi", model, details=True, **asked)
        assert found.token_ids == full.token_ids[:after]
        assert found.finish_reason == "stop"
        pieces = list(stream_generate("hi", model, **asked))
        assert "".join(piece.text for piece in pieces) == found.text
        assert full.text.startswith(found.text) and len(found.text) < len(full.text)


def test_many_prompts_are_no_string_and_draw_with_seeds_of_their_own(model):
    for prompts in ("hello", 5, None):
        with pytest.raises(ValueError, match="prompts is .*, not a list of prompts"):
            generate_many(prompts, model)
    how = {"temperature": 1.0, "max_new_tokens": 12}
    first, second = generate_many((p for p in ("hi", "hi")), model, seed=5, **how)
    assert first == generate("hi", model, seed=5, **how) != second
    seed = (5 + 0x9E3779B97F4A7C15) % 2**64
    assert second == generate("hi", model, seed=seed, **how)


def turns(count: int, size: int) -> list[dict]:
    """A conversation of turns of `size` characters, the last one the user's."""
    roles = ("user", "assistant")
    return [
        {"role": roles[index % 2], "content": chr(97 + index) * size}
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("system", "fitting"), [([], 5), ([SYSTEM], 3)], ids=["bare", "system"]
)
def test_truncated_conversations_lose_whole_turns_but_the_systems(
    model, system, fitting
):
    context = model.config.context_length
    messages = turns(9, 30)
    ids = fitted_prompt(model, [*system, *messages], 20, "prompt")
    kept = [*system, *messages[-fitting:]]
    assert len(ids) + 20 <= context
    assert ids == encode_prompt(model, kept)
    longer = [*system, *messages[-fitting - 2 :]]
    assert len(encode_prompt(model, longer)) + 20 > context
    # What fits is left alone, as is what nobody asked to cut.
    assert fitted_prompt(model, kept, 20, "prompt") == ids
    assert fitted_prompt(model, longer, 20, "answer") == encode_prompt(model, longer)


@pytest.mark.parametrize("system", [[], [SYSTEM]], ids=["bare", "system"])
def test_a_last_turn_that_is_too_long_loses_its_beginning(model, system):
    text = "".join(f"{index} é " for index in range(200))
    messages = [*system, *turns(2, 5), {"role": "user", "content": text}]
    ids = fitted_prompt(model, messages, 20, "prompt")
    room = model.config.context_length - 20
    assert room - 3 <= len(ids) <= room
    whole = encode_prompt(model, [*system, messages[-1]])
    opening = len(encode_prompt(model, [*system, {"role": "user", "content": ""}])) - 16
    assert ids[:opening] == whole[:opening] and ids[-150:] == whole[-150:]
    with pytest.raises(ValueError, match="the context holds 247"):
        generate([{"role": "system", "content": text}], model, truncate="prompt")


def test_a_chat_goes_on_when_it_no_longer_fits(model):
    talk = chat(model, system="Be brief.")
    for index in range(6):
        answer = talk.send("x" * 40, 8, truncate="prompt", stop=None)
        assert talk.messages[-1]["content"] == answer
        assert len(talk.messages) == 3 + 2 * index
    with pytest.raises(ValueError, match="the context holds 247"):
        talk.send("x" * 40, 8)
    assert len(talk.messages) == 13


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_stream_that_is_closed_leaves_what_was_given(model, taken):
    talk = chat(model)
    stream = talk.stream("tell me", 60, min_new_tokens=60)
    given = "".join(next(stream).text for _ in range(taken))
    stream.close()
    left = [
        {"role": "user", "content": "tell me"},
        {"role": "assistant", "content": given},
    ]
    # One that was never begun is no turn.
    assert talk.messages == (left if taken else [])
    answer = talk.send("go on", 6)
    assert answer == generate(talk.messages[:-1], model, max_new_tokens=6)


def test_a_conversation_gives_one_answer_at_a_time(model):
    talk = chat(model)
    early = talk.stream("never begun", 8)
    stream = talk.stream("tell me", 60, min_new_tokens=60)
    next(stream)
    with pytest.raises(ValueError, match="another answer .* is being streamed"):
        talk.send("and this?", 4)
    with pytest.raises(ValueError, match="another answer .* is being streamed"):
        next(early)
    stream.close()
    late = talk.stream("tell me", 8)
    talk.send("and this?", 4)
    with pytest.raises(ValueError, match="has gone on since this stream"):
        next(late)
    asked = [message["content"] for message in talk.messages[::2]]
    assert asked == ["tell me", "and this?"]


def test_an_answer_that_fails_is_no_turn(model):
    talk = chat(model)
    talk.send("hi", 4)
    messages = talk.messages
    others = dict.fromkeys(range(1, 300), -float("inf")) | {0: -100.0}
    with pytest.raises(ValueError, match="leave no token"):
        talk.send("go on", 4, logit_bias=others, frequency_penalty=1e6)
    assert talk.messages == messages
    assert talk.send("go on", 4) == generate(
        [*messages, {"role": "user", "content": "go on"}], model, max_new_tokens=4
    )

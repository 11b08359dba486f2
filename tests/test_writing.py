"""Text that a model writes itself: against plain decoding, and in any company."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_chat
from conftest import run_one

from m2r2_jax import build_method
from m2r2_jax.training import writing
from m2r2_jax.training.exchanges import chat_frame
from m2r2_jax.training.inverse_cdf import inverse_cdf
from m2r2_jax.training.writing import LOOP_NGRAM
from m2r2_jax.training.writing_state import WritingConfig

CONFIG = WritingConfig(
    rows=4, max_prompt_tokens=12, max_answer_tokens=40, sampled_every=3, seed=5
)
PROMPTS = [[10, 20, 30], [7], [40, 41, 42, 43, 44], [99, 98], [1, 2, 3, 4], [60] * 12]


@functools.cache
def model():
    return tiny_chat.chat_model()


@functools.cache
def frame():
    return chat_frame(model().tokenizer)


def written(config=CONFIG, count=10, first=0, prompts=(), steps=7):
    state = writing.start(model(), frame(), config, count, prompts)
    eos = jnp.asarray(sorted(model().tokenizer.eos_ids), jnp.int32)
    while not bool(state.done):
        state = writing.write(
            model().decoder,
            model().params,
            frame(),
            config,
            eos,
            jnp.int32(first),
            state,
            jnp.int32(steps),
        )
    return writing.collect(frame(), state), state


def without_loops(ids: list[int]) -> list[int]:
    """Cut where an n-gram of the answer ends its third appearance."""
    seen: dict = {}
    for end in range(LOOP_NGRAM, len(ids) + 1):
        gram = tuple(ids[end - LOOP_NGRAM : end])
        seen[gram] = seen.get(gram, 0) + 1
        if seen[gram] == 3:
            return ids[:end]
    return ids


def test_the_frame_is_the_template_around_a_turn():
    tokenizer = model().tokenizer
    whole = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert [*frame().opening, *tokenizer.encode("hello"), *frame().bridge] == whole


def test_greedy_answers_are_those_of_plain_decoding():
    config = dataclasses.replace(CONFIG, sampled_every=10**6)
    found, _ = written(config, len(PROMPTS), first=1, prompts=PROMPTS)
    plain = build_method("autoregressive", model())
    endings = set()
    for prompt, conversation in zip(PROMPTS, found, strict=True):
        ids = [*frame().opening, *prompt, *frame().bridge]
        expected = without_loops(run_one(model(), plain, ids, 40).token_ids)
        assert conversation.prompt_ids == prompt
        assert conversation.answer_ids == expected
        assert conversation.finished == (expected[-1] == 257)
        endings.add((conversation.finished, len(expected) == 40))
    assert len(endings) > 1  # Some ended by themselves or in a loop, others were cut.


def test_a_conversation_does_not_depend_on_its_company():
    together, _ = written(count=10)
    assert written(count=10, steps=1)[0] == together
    assert written(count=10, steps=1000)[0] == together
    assert written(count=4, first=6)[0] == together[6:]
    other = dataclasses.replace(CONFIG, seed=6)
    assert written(other, 10)[0] != together


def test_limits_hold_and_tokens_are_counted():
    found, state = written(count=10)
    assert all(len(c.prompt_ids) <= 12 and len(c.answer_ids) <= 40 for c in found)
    own = sum(len(c.prompt_ids) + len(c.answer_ids) for c in found)
    # A turn's own end is the bridge's first id, and counted with the template.
    assert int(state.tokens) == own


def test_draws_follow_the_softmax():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(1, 300)) * 2, jnp.float32)
    draws = 200_000
    uniform = jnp.asarray(rng.random(draws), jnp.float32)
    many = jnp.broadcast_to(logits, (1000, 300))
    counts = np.zeros(300)
    for piece in np.split(uniform, draws // 1000):
        drawn = np.asarray(inverse_cdf(many, piece))
        counts += np.bincount(drawn, minlength=300)
    p = np.exp(np.float64(logits[0]) - np.logaddexp.reduce(np.float64(logits[0])))
    reference = rng.multinomial(draws, p)
    distance = np.abs(counts / draws - p).sum() / 2
    assert distance < 1.2 * np.abs(reference / draws - p).sum() / 2


def test_draws_stay_in_the_vocabulary_at_both_ends():
    logits = jnp.full((2, 300), -1e4).at[:, 299].set(0.0)
    ends = jnp.asarray([0.0, np.nextafter(np.float32(1), np.float32(0))])
    assert inverse_cdf(logits, ends).tolist() == [299, 299]


@pytest.mark.parametrize(
    ("changes", "prompts", "message"),
    [
        ({"rows": 0}, (), "rows 0 must be at least 1"),
        ({"answer_temperature": 0.0}, (), "answer_temperature 0.0 must be positive"),
        ({}, [[1]] * 9 + [[1] * 13], "prompt 9 has 13 tokens, max_prompt_tokens is 12"),
        ({"max_answer_tokens": 300}, (), "may take 331 tokens, the context holds 247"),
    ],
)
def test_wrong_settings_are_refused(changes, prompts, message):
    with pytest.raises(ValueError, match=message):
        written(dataclasses.replace(CONFIG, **changes), 10, prompts=prompts)


def test_a_template_that_hides_the_user_is_refused():
    class Silent:
        def render(self, messages):
            return "nothing"

    with pytest.raises(ValueError, match="does not repeat a user turn once"):
        chat_frame(Silent())

"""Tests of sessions: what a turn reuses, how the cache grows, what is refused."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import (
    NEVER,
    PLAIN,
    TINY,
    TINY_METHODS,
    run_one,
)

from m2r2_jax.checkpoints.model import Model
from m2r2_jax.decoding import passes
from m2r2_jax.decoding.settings import SamplingParams
from m2r2_jax.drafters import PromptLookup
from m2r2_jax.drafters.methods import Method
from m2r2_jax.serving import session
from m2r2_jax.serving.session import Session

PROMPT = [5, 17, 42, 3]
NEXT_TURN = [11, 12, 13]


every_method = pytest.mark.parametrize(
    "method", TINY_METHODS.values(), ids=TINY_METHODS
)


def ids_of(session: Session, prompt: list[int], count: int = 20) -> list[int]:
    return session.run([prompt], count)[0][0].token_ids


@every_method
def test_second_turn_reuses_the_first_and_changes_nothing(tiny_model, method):
    session = Session(tiny_model, method)
    text = PROMPT + ids_of(session, PROMPT)
    second = text + NEXT_TURN
    plan = session.plan([second], 20)
    assert plan.kept == (len(text) - 1,)
    assert plan.chunks == (16,)
    (answer,), _ = session.run([second], 20)
    assert answer == run_one(tiny_model, method, second, 20)
    assert session.cached_ids == [second + answer.token_ids[:-1]]


@every_method
def test_edited_history_reuses_the_common_prefix_alone(tiny_model, method):
    session = Session(tiny_model, method)
    text = PROMPT + ids_of(session, PROMPT)
    edited = text[:10] + [(text[10] + 1) % TINY.vocab_size] + text[11:]
    assert session.plan([edited], 20).kept == (10,)
    assert session.run([edited], 20)[0][0] == run_one(tiny_model, method, edited, 20)


@every_method
def test_same_or_shorter_prompt_again(tiny_model, method):
    session = Session(tiny_model, method)
    first = ids_of(session, PROMPT)
    assert session.plan([PROMPT], 20).kept == (len(PROMPT) - 2,)
    assert ids_of(session, PROMPT) == first
    assert session.plan([PROMPT[:1]], 20).kept == (0,)
    assert (
        ids_of(session, PROMPT[:1])
        == run_one(tiny_model, method, PROMPT[:1], 20).token_ids
    )


def test_unrelated_prompt_reuses_nothing(tiny_model):
    session = Session(tiny_model, PLAIN)
    ids_of(session, PROMPT)
    other = [99, *PROMPT]
    assert session.plan([other], 20).kept == (0,)
    assert ids_of(session, other) == run_one(tiny_model, PLAIN, other, 20).token_ids


def test_truncated_positions_are_computed_again(tiny_model):
    session = Session(tiny_model, PLAIN)
    text = PROMPT + ids_of(session, PROMPT)
    session.truncate([6])
    assert session.cached_ids == [text[:6]]
    second = text + NEXT_TURN
    assert session.plan([second], 20).kept == (6,)
    assert ids_of(session, second) == run_one(tiny_model, PLAIN, second, 20).token_ids


def test_rows_of_a_batch_keep_their_own_prefixes(tiny_model):
    session = Session(tiny_model, PLAIN, batch=2)
    first = [PROMPT, [1, 1, 1]]
    answers, _ = session.run(first, 20)
    texts = [p + a.token_ids for p, a in zip(first, answers, strict=True)]
    second = [texts[0] + NEXT_TURN, [1, 1, 7, 8, 9]]
    assert session.plan(second, 20).kept == (len(texts[0]) - 1, 2)
    answers, _ = session.run(second, 20)
    for prompt, answer in zip(second, answers, strict=True):
        expected = run_one(tiny_model, PLAIN, prompt, 20).token_ids
        assert answer.token_ids == expected


def test_cache_grows_between_turns_and_never_shrinks(tiny_model):
    config = dataclasses.replace(TINY, context_length=600)
    model = dataclasses.replace(tiny_model, config=config)
    session = Session(model, PLAIN)
    text = PROMPT + ids_of(session, PROMPT)
    assert session._cache.capacity == 256
    long = text + [*range(100, 290)] + [*range(100, 190)]
    plan = session.plan([long], 20)
    assert (plan.capacity, plan.kept, plan.chunks) == (512, (len(text) - 1,), (256, 32))
    found = ids_of(session, long)
    assert session._cache.capacity == 512
    assert found == ids_of(Session(model, PLAIN), long)
    assert session.plan([PROMPT], 1).capacity == 512


def test_plan_changes_nothing(tiny_model):
    session = Session(tiny_model, PLAIN)
    text = PROMPT + ids_of(session, PROMPT)
    cached, cache = session.cached_ids, session._cache
    plan = session.plan([text + NEXT_TURN], 20)
    assert session.plan([text + NEXT_TURN], 20) == plan
    assert session.cached_ids == cached and session._cache is cache


def test_cached_ids_are_a_copy(tiny_model):
    session = Session(tiny_model, PLAIN)
    ids_of(session, PROMPT, 2)
    session.cached_ids[0].append(7)
    assert session.cached_ids[0][: len(PROMPT)] == PROMPT
    assert len(session.cached_ids[0]) == len(PROMPT) + 1


@pytest.mark.parametrize(
    ("lengths", "count", "expected"),
    [
        ([4], 20, session.Plan((0,), (24,), (16,), 256)),
        ([1], 0, session.Plan((0,), (1,), (), 256)),
        ([240, 4], [7, 20], session.Plan((0, 0), (247, 24), (256,), 256)),
    ],
)
def test_plan_of_a_new_session(tiny_model, lengths, count, expected):
    prompts = [[1] * length for length in lengths]
    new = Session(tiny_model, PLAIN, batch=len(lengths))
    assert new.plan(prompts, count) == expected


def test_plan_leaves_room_for_the_rows_of_a_pass(tiny_model):
    config = dataclasses.replace(TINY, context_length=600)
    model = dataclasses.replace(tiny_model, config=config)
    drafter = Method("lookup", PromptLookup(8, 3, 2))
    for method, rows in ((PLAIN, 2), (drafter, 9)):
        for limit in (256 - rows, 257 - rows):
            plan = Session(model, method).plan([[1] * 9], limit - 9)
            assert plan.capacity == (256 if limit + rows <= 256 else 512)


def test_timing_is_of_both_phases(tiny_model):
    _, timing = Session(tiny_model, PLAIN).run([PROMPT], 5)
    assert timing.prefill_seconds > 0 and timing.decode_seconds > 0


@pytest.fixture
def used_session(tiny_model, monkeypatch):
    """A session with a cache, in which nothing may reach the device any more."""
    used = Session(tiny_model, PLAIN)
    used.run([PROMPT], 3)

    def forbidden(*arguments, **settings):
        raise AssertionError("device work before the arguments were checked")

    monkeypatch.setattr(passes, "prefill", forbidden)
    monkeypatch.setattr(session, "grow", forbidden)
    monkeypatch.setattr(Model, "place", forbidden)
    return used


@pytest.mark.parametrize(
    ("prompts", "count", "settings", "message"),
    [
        ([[]], 5, {}, "prompt 0 is empty"),
        ([[1] * 247], 5, {}, r"prompt 0 has 247 tokens and may get 5 new ones"),
        ([[1] * 900], 5, {}, r"900 tokens .* the context holds 247; shorten the"),
        ([[1, 300]], 5, {}, r"ids from 1 to 300; the vocabulary has 0\.\.299"),
        ([[1, -1]], 5, {}, r"ids from -1 to 1"),
        ([[1]], -1, {}, "max_new_tokens -1"),
        ([[1], [2]], 5, {}, "2 prompts for a session of 1 rows"),
        ([], 5, {}, "0 prompts for a session of 1 rows"),
        ([[1]], 5, {"sampling": [SamplingParams()] * 2}, "2 values of sampling"),
        ([[1]], [5, 5], {}, "2 values of max_new_tokens"),
        (
            [[1]],
            5,
            {"sampling": SamplingParams(logit_bias={300: 1.0})},
            r"logit_bias names id 300; the vocabulary has 0\.\.299",
        ),
        ([[1]], 5, {"stop": "x"}, "stop 'x' must be a list"),
        ([[1]], 5, {"stop": [""]}, "non-empty"),
        ([[1]], 5, {"truncate": "middle"}, "truncate 'middle' is none of answer"),
        ([[1] * 240], 8, {}, r"240 tokens and may get 8 new ones, the context holds"),
        ([[1] * 247], 5, {"truncate": "answer"}, "the context holds 247"),
        ([[1]], 2.5, {}, "max_new_tokens 2.5 must be an integer, 0 or more"),
        ([[1]], 10.0, {}, "max_new_tokens 10.0 must be an integer"),
        ([[1]], "10", {}, "max_new_tokens '10' must be an integer"),
        ([[1]], None, {}, "max_new_tokens None must be an integer"),
        ([[1]], [2.5], {}, "max_new_tokens 2.5 must be an integer"),
        ([[1]], True, {}, "max_new_tokens True must be an integer"),
        ([[1.0]], 5, {}, "prompt 0: token id 1.0 must be an integer"),
        ([["1"]], 5, {}, "prompt 0: token id '1' must be an integer"),
        (["hello"], 5, {}, "prompt 0 is 'hello', not a list of token ids"),
        ([7], 5, {}, "prompt 0 is 7, not a list"),
        ([[1]], 5, {"sampling": {"seed": 1}}, "sampling of row 0 is 'seed'"),
        ([[1]], 5, {"sampling": 0.7}, "sampling of row 0 is 0.7, no SamplingParams"),
        ([[1]], 5, {"stop": 7}, "stop 7 must be a list"),
        ([[1]], 5, {"stop": [None]}, "non-empty"),
        (
            [[1]],
            5,
            {"sampling": SamplingParams(min_new_tokens=6)},
            "min_new_tokens 6 of row 0 is above its max_new_tokens 5",
        ),
        ([[1] * 4], 247, {"truncate": "prompt"}, "the context holds 247"),
    ],
)
def test_mistakes_are_refused_before_any_work(
    used_session, prompts, count, settings, message
):
    cached = used_session.cached_ids
    with pytest.raises(ValueError, match=message):
        used_session.run(prompts, count, **settings)
    assert used_session.cached_ids == cached
    assert used_session._cache is not None


def test_second_row_is_named_in_errors(tiny_model):
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        Session(tiny_model, PLAIN, batch=2).run([[1], []], 5)


def test_end_ids_are_the_tokenizers_unless_given(tiny_model):
    greedy = run_one(tiny_model, PLAIN, PROMPT, 20).token_ids

    class Ends:
        eos_ids = frozenset({greedy[4]})

    model = dataclasses.replace(tiny_model, tokenizer=Ends())
    expected = greedy[: greedy.index(greedy[4]) + 1]
    assert run_one(model, PLAIN, PROMPT, 20).token_ids == expected
    assert run_one(model, PLAIN, PROMPT, 20, eos_ids=NEVER).token_ids == greedy


def test_numpy_prompts_are_as_good_as_lists(tiny_model):
    answer = run_one(tiny_model, PLAIN, np.array(PROMPT), 20)
    assert answer == run_one(tiny_model, PLAIN, PROMPT, 20)


def test_requests_leave_no_memory_behind(tiny_model):
    used = [Session(tiny_model, method) for method in TINY_METHODS.values()]

    def buffers_after_a_round():
        for one in used:
            ids_of(one, PROMPT)
        return sum(array.nbytes for array in jax.live_arrays())

    buffers_after_a_round()
    counts = {buffers_after_a_round() for _ in range(3)}
    assert len(counts) == 1

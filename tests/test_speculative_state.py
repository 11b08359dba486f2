"""Tests of draft-verify state: batches (I6), compilation (I7), the cache (I9)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    NEVER,
    PLAIN,
    TINY,
    TINY_DECODER,
    drawn,
)
from draft_methods import (
    CHAIN,
    KINDS,
    METHODS,
    PROMPTS,
    TREE,
    assert_cache_is_fresh_prefill,
    every_kind,
    run,
)
from scripted_drafters import ALL, NONE, script

from m2r2_jax.decoding import loop, passes
from m2r2_jax.drafters.methods import Method
from m2r2_jax.models.cache import init_cache
from m2r2_jax.ops.compilation import CompileClock
from m2r2_jax.serving.engine import Engine
from m2r2_jax.serving.requests import make_request
from m2r2_jax.serving.session import Session

RAGGED = [PROMPTS[3], PROMPTS[0], PROMPTS[1]]


@every_kind
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_i6_ragged_rows_equal_their_own_runs(tiny_model, plain, name, temperature):
    settings = {"temperature": temperature, "seed": 4}
    truths = [prompt + plain(prompt, 49, **settings) for prompt in RAGGED]
    session = Session(tiny_model, METHODS[name](truths), batch=3)
    answers, _ = session.run(RAGGED, 40, **drawn(**settings))
    for prompt, answer in zip(RAGGED, answers, strict=True):
        expected, alone, _ = run(tiny_model, plain, name, prompt, 40, **settings)
        assert answer.token_ids == expected
        assert answer == alone
    assert len({tuple(answer.accepted) for answer in answers}) > 1
    texts = [p + a.token_ids for p, a in zip(RAGGED, answers, strict=True)]
    assert_cache_is_fresh_prefill(session, texts)


def test_i6_rows_end_one_by_one(tiny_model, plain):
    """One row meets an end id early, one fills the context, one runs to its limit."""
    long = PROMPTS[0] + plain(PROMPTS[0], TINY.context_length)
    prompts = [PROMPTS[3], long[:-5], PROMPTS[1]]
    ends = frozenset({plain(PROMPTS[3], 40)[6]})
    expected = [plain(prompt, 30, eos_ids=ends) for prompt in prompts]
    assert len({len(ids) for ids in expected}) == 3
    truths = [prompt + plain(prompt, 39) for prompt in prompts]
    for name in ("chain-mixed", "tree-moving"):
        session = Session(tiny_model, METHODS[name](truths), batch=3)
        answers, _ = session.run(prompts, 30, eos_ids=ends, truncate="answer")
        assert [answer.token_ids for answer in answers] == expected
        texts = [p + a.token_ids for p, a in zip(prompts, answers, strict=True)]
        assert_cache_is_fresh_prefill(session, texts)


@every_kind
def test_i7_nothing_compiles_after_the_first_run(tiny_model, plain, name):
    jobs = [(prompt, count) for prompt in PROMPTS for count in (40, 39, 33, 21)]
    for prompt in PROMPTS:
        run(tiny_model, plain, name, prompt, 40)
    for prompt, count in jobs:
        plain(prompt, count), plain(prompt, count + 9)
    clock = CompileClock()
    rounds = []
    for prompt, count in jobs:
        expected, answer, _ = run(tiny_model, plain, name, prompt, count)
        assert answer.token_ids == expected
        rounds += answer.accepted
    assert len(rounds) >= 200
    assert len(set(rounds)) >= 3, "acceptance must vary"
    assert clock.count == 0


def test_compile_clock_sees_a_new_program():
    """The test above would prove nothing if the clock stood still."""
    clock = CompileClock()
    jax.jit(lambda x: x * 3.25 + 17)(jnp.ones(7))
    assert clock.count >= 1


@every_kind
@pytest.mark.parametrize("ending", ["limit", "end id", "steps"])
def test_i9_cache_is_that_of_a_fresh_prefill(tiny_model, plain, name, ending):
    for prompt in PROMPTS:
        greedy = plain(prompt, 40)
        settings = {}
        if ending == "end id":
            settings = {"eos_ids": frozenset({greedy[17]})}
        if ending == "steps":
            session = Session(tiny_model, METHODS[name]([prompt + plain(prompt, 49)]))
            (answer,), _ = session.run([prompt], 40, max_steps=3)
            assert len(answer.committed) == 3
        else:
            _, answer, session = run(tiny_model, plain, name, prompt, 40, **settings)
        assert answer.token_ids == greedy[: len(answer.token_ids)]
        assert_cache_is_fresh_prefill(session, [prompt + answer.token_ids])


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("name", ["plain", *KINDS])
@pytest.mark.parametrize("where", ["prefill", "loop"])
def test_i9_session_survives_an_exception(tiny_model, plain, name, where, monkeypatch):
    prompt = PROMPTS[0]
    truth = prompt + plain(prompt, 80)
    method = PLAIN if name == "plain" else METHODS[name]([truth])
    session = Session(tiny_model, method)
    session.run([prompt], 20)
    turn = truth[: len(prompt) + 20 + 1]

    def interrupt(*arguments, **settings):
        raise Interrupted

    with monkeypatch.context() as patch:
        broken = {"prefill": (passes, "prefill"), "loop": (loop, "decode")}
        patch.setattr(*broken[where], interrupt)
        with pytest.raises(Interrupted):
            session.run([turn], 20)
    (answer,), _ = session.run([turn], 20)
    assert answer.token_ids == truth[len(turn) :][:20]
    assert_cache_is_fresh_prefill(session, [turn + answer.token_ids])


@pytest.mark.parametrize("drafter", [CHAIN, TREE], ids=["chain", "tree"])
def test_update_is_told_the_state_of_the_token_before_the_root(
    tiny_model, plain, drafter
):
    prompt = PROMPTS[0]
    truth = prompt + plain(prompt, 49)
    told = script([truth], pick=[0, 1, 0, ALL, NONE, 0, ALL])
    for rounds in range(1, 6):
        engine = Engine(tiny_model, Method("scripted", drafter, told), 1)
        request = make_request(tiny_model, 1, [prompt], 40, eos_ids=NEVER)
        state = engine.begin(request, engine.new_cache(256))
        state = engine.advance(state, rounds)
        length = int(state.length[0])
        assert state.history[0, :length].tolist() == truth[:length]
        expected = final_state(tiny_model, truth[: length - 1])
        np.testing.assert_allclose(state.drafter[0], expected, atol=1e-5)


def final_state(model, ids: list[int]):
    """Normalised final state of the last of the ids."""
    tokens = np.zeros((1, 256), np.int32)
    tokens[0, : len(ids)] = ids
    cache = init_cache(TINY, 1, 256, jnp.float32, unrolled=True)
    hidden, count = jnp.zeros((1, TINY.width)), np.array([len(ids)], np.int32)
    return passes.prefill(TINY_DECODER, model.params, cache, hidden, tokens, count)[1][
        0
    ]

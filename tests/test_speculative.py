"""Tests of draft-verify decoding: I4, I6, I7 and I9 for every drafter.

Drafters of the library and scripted ones (see `scripted_drafters`) go through the same
tests; in exact mode each must give the tokens of plain decoding.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    NEVER,
    PLAIN,
    TINY,
    drawn,
    run_one,
    tiny_accelerators,
    tiny_params,
)
from scripted_drafters import ALL, NONE, Scripted, accepted_depths, script

from m2r2_jax import decoding, speculative, transformer
from m2r2_jax.cache import init_cache
from m2r2_jax.compilation import CompileClock
from m2r2_jax.draft_head import draft_head
from m2r2_jax.drafters import MultiRateChain, PromptLookup, RandomDraft
from m2r2_jax.engine import Engine
from m2r2_jax.methods import EXACT_ROWS, Method
from m2r2_jax.requests import make_request
from m2r2_jax.session import Session
from m2r2_jax.speculative import Layout

PROMPTS = [[5, 17, 42, 3], [1, 1, 1], [7], [*range(100, 117)], [9, 8, 7, 6, 9, 8, 7]]
CHAIN = Scripted(Layout.chain(8), TINY.vocab_size)
TREE = Scripted(Layout((-1, 0, 0, 1, 1, 2, 2, 3, 7)), TINY.vocab_size)
SCRIPTS = {
    "right": {"pick": [0]},
    "wrong": {"pick": [NONE]},
    "mixed": {"pick": [0, 0, NONE, 0, NONE, 0, 0], "proposed": [8, 8, 3, 8, 8]},
    "sparse": {"pick": [0], "proposed": np.random.default_rng(1).integers(9, size=60)},
}
TREE_SCRIPTS = {
    "first": {"pick": [0]},
    "second": {"pick": [1]},
    "moving": {"pick": [1, 0, 1, 0, 0, NONE, 0]},
    "twins": {"pick": [ALL, 1, 0, ALL, 0, ALL, NONE]},
    "pruned": {"pick": [0, 1, ALL], "proposed": [0, 2, 1, 4, 3]},
}
M2R2 = {  # exit layer, length, least confidence
    "1": (1, 4, 0.0),
    "2": (2, 8, 0.3),
    "4": (4, 2, 0.0),
}
ACCELERATORS = {
    "zero": {"scale": 0.0, "carry": 0.0},
    "random": {"scale": 0.3, "carry": 0.0},
    "carry": {"scale": 0.3, "carry": 0.5},
}


def m2r2(shape: str, kind: str, unrolled: bool = True) -> Method:
    exit_layer, length, confidence = M2R2[shape]
    accelerators = tiny_accelerators(exit_layer, **ACCELERATORS[kind])
    if unrolled:
        accelerators["layers"] = transformer.unroll(accelerators["layers"])
    drafter = MultiRateChain(TINY, exit_layer, length, confidence)
    params = {"accelerators": accelerators, "head": draft_head(tiny_params())}
    return Method("m2r2", drafter, params, rows=EXACT_ROWS)


def methods() -> dict:
    """By name: `truths -> Method`."""

    def fixed(drafter):
        return lambda truths: Method("fixed", drafter, rows=EXACT_ROWS)

    def scripted(drafter, told):
        return lambda truths: Method(
            "scripted", drafter, script(truths, **told), rows=EXACT_ROWS
        )

    return {
        **{
            f"m2r2-{shape}-{kind}": lambda truths, a=(shape, kind): m2r2(*a)
            for shape in M2R2
            for kind in ACCELERATORS
        },
        "prompt_lookup": fixed(PromptLookup(8, 3, 2)),
        "random_draft": fixed(RandomDraft(TINY.vocab_size, 5)),
        **{f"chain-{name}": scripted(CHAIN, told) for name, told in SCRIPTS.items()},
        **{f"tree-{name}": scripted(TREE, told) for name, told in TREE_SCRIPTS.items()},
    }


METHODS = methods()
# One of each kind, for tests that need not see every script.
KINDS = ["m2r2-2-carry", "prompt_lookup", "chain-mixed", "tree-moving"]
every_method = pytest.mark.parametrize("name", METHODS)
every_kind = pytest.mark.parametrize("name", KINDS)


@pytest.fixture(scope="module")
def plain(tiny_model):
    """Plain decoding of one prompt, remembered: `(prompt, count, **settings) -> ids`"""

    @functools.cache
    def ids(prompt, count, temperature, seed, eos_ids):
        settings = {"temperature": temperature, "seed": seed, "eos_ids": eos_ids}
        return run_one(tiny_model, PLAIN, list(prompt), count, **settings).token_ids

    def answer(prompt, count, temperature=0.0, seed=0, eos_ids=NEVER):
        return list(ids(tuple(prompt), count, temperature, seed, eos_ids))

    return answer


def run(model, plain, name, prompt, count, **settings):
    """Expected ids, the answer of a method, and the session that gave it."""
    expected = plain(prompt, count, **settings)
    # A scripted drafter goes on behind the end of an answer, as any other does.
    free = {key: value for key, value in settings.items() if key != "eos_ids"}
    room = TINY.context_length - len(prompt)
    truth = prompt + plain(prompt, min(count + 9, room), **free)
    session = Session(model, METHODS[name]([truth]))
    (answer,), _ = session.run([prompt], count, **drawn(**settings))
    return expected, answer, session


def assert_counts(answer):
    assert sum(answer.committed) == len(answer.token_ids)
    assert len(answer.proposed) == len(answer.accepted) == len(answer.committed)
    for proposed, accepted, committed in zip(
        answer.proposed, answer.accepted, answer.committed, strict=True
    ):
        assert 0 <= accepted <= proposed
        assert 1 <= committed <= accepted + 1
    if answer.token_ids:
        assert answer.tau == len(answer.token_ids) / len(answer.committed)
    else:
        assert answer.tau is None


def assert_cache_is_fresh_prefill(session, texts):
    """I9: positions, keys and values are those of the texts but their last token."""
    cache, batch = session._cache, len(texts)
    np.testing.assert_array_equal(cache.length, [len(text) - 1 for text in texts])
    assert session.cached_ids == [text[:-1] for text in texts]
    counts = np.array([len(text) - 1 for text in texts], np.int32)
    tokens = np.zeros((batch, 256), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : counts[row]] = text[:-1]
    fresh = init_cache(TINY, batch, 256, jnp.float32, unrolled=True)
    hidden = jnp.zeros((batch, TINY.width))
    params = session.model.params
    fresh, _ = decoding.prefill(TINY, params, fresh, hidden, tokens, counts)
    committed = np.arange(256) < counts[:, None]
    for found, expected in zip(
        (*cache.keys, *cache.values), (*fresh.keys, *fresh.values), strict=True
    ):
        found, expected = (
            np.asarray(x).reshape(batch, TINY.num_kv_heads, -1, TINY.head_dim)
            for x in (found, expected)
        )
        for row in range(batch):
            np.testing.assert_allclose(
                found[row][:, committed[row]],
                expected[row][:, committed[row]],
                atol=1e-5,
            )


@every_method
def test_i4_greedy_equals_plain_decoding(tiny_model, plain, name):
    for prompt in PROMPTS:
        expected, answer, _ = run(tiny_model, plain, name, prompt, 40)
        assert answer.token_ids == expected
        assert answer.finish_reason == "length"
        assert_counts(answer)


@every_method
def test_i4_sampling_equals_plain_decoding(tiny_model, plain, name):
    for seed, prompt in enumerate(PROMPTS[:3]):
        expected, answer, _ = run(
            tiny_model, plain, name, prompt, 30, temperature=0.9, seed=seed
        )
        assert answer.token_ids == expected
        assert expected != plain(prompt, 30)
        assert_counts(answer)


def test_i4_holds_over_stacked_weights(tiny_stacked_model, plain):
    method = m2r2("2", "carry", unrolled=False)
    for prompt in PROMPTS[:3]:
        answer = run_one(tiny_stacked_model, method, prompt, 40)
        assert answer.token_ids == plain(prompt, 40)


def test_i4_holds_without_exact_mode_where_there_are_no_near_ties(tiny_model, plain):
    method = Method("inexact", PromptLookup(8, 3, 2))
    for prompt in PROMPTS:
        answer = run_one(tiny_model, method, prompt, 40)
        assert answer.token_ids == plain(prompt, 40)


@every_kind
def test_end_id_inside_an_accepted_block_ends_at_its_first_occurrence(
    tiny_model, plain, name
):
    prompt = PROMPTS[0]
    greedy = plain(prompt, 40)
    for token in sorted(set(greedy[:25])):
        expected, answer, session = run(
            tiny_model, plain, name, prompt, 40, eos_ids=frozenset({token})
        )
        assert expected == greedy[: greedy.index(token) + 1]
        assert answer.token_ids == expected
        assert answer.finish_reason == "stop"
        assert_counts(answer)
        assert session.cached_ids == [prompt + expected[:-1]]


def test_blocks_are_cut_by_end_ids(tiny_model, plain):
    """The test above would prove little if no accepted block had been cut."""
    prompt, greedy = PROMPTS[0], plain(PROMPTS[0], 40)
    ends = frozenset({greedy[12]})
    _, answer, _ = run(tiny_model, plain, "chain-right", prompt, 40, eos_ids=ends)
    assert answer.accepted[-1] + 1 > answer.committed[-1]


@every_kind
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_max_new_tokens_is_exact_below_the_draft_length(tiny_model, plain, name, count):
    for prompt in PROMPTS:
        expected, answer, session = run(tiny_model, plain, name, prompt, count)
        assert len(expected) == count
        assert answer.token_ids == expected
        assert_counts(answer)
        assert_cache_is_fresh_prefill(session, [prompt + expected])


@pytest.mark.parametrize("name", [*KINDS, "chain-right", "tree-first"])
@pytest.mark.parametrize("room", [1, 2, 7])
def test_answer_ends_at_the_context_end(tiny_model, plain, name, room):
    text = PROMPTS[0] + plain(PROMPTS[0], TINY.context_length)
    assert len(text) == TINY.context_length
    session = Session(tiny_model, METHODS[name]([text]))
    (answer,), _ = session.run([text[:-room]], 50, truncate="answer")
    assert answer.token_ids == text[-room:]
    assert answer.finish_reason == "length"
    assert session._cache.capacity == 256, "this is meant to fill the smallest cache"
    assert_counts(answer)
    assert_cache_is_fresh_prefill(session, [text])


def test_first_draft_may_be_wrong(tiny_model, plain):
    expected, answer, _ = run(tiny_model, plain, "prompt_lookup", [1, 1, 1], 40)
    assert answer.proposed[0] > 0 and answer.accepted[0] == 0
    assert expected[0] != 1
    assert answer.token_ids == expected


@pytest.mark.parametrize("told", SCRIPTS)
@pytest.mark.parametrize("prompt", PROMPTS[:3])
def test_acceptance_is_counted_as_scripted(tiny_model, plain, told, prompt):
    _, answer, _ = run(tiny_model, plain, f"chain-{told}", prompt, 40)
    pick = SCRIPTS[told].get("pick")
    proposed = SCRIPTS[told].get("proposed", [8])
    end = len(prompt) + 40
    expected = accepted_depths(len(prompt), end, pick, proposed, depth=8)
    assert answer.accepted == expected
    assert answer.committed[:-1] == [count + 1 for count in expected[:-1]]


def test_scripts_reach_every_acceptance_length(tiny_model, plain):
    chain, tree = set(), set()
    for prompt in PROMPTS:
        for told in SCRIPTS:
            chain.update(
                run(tiny_model, plain, f"chain-{told}", prompt, 40)[1].accepted
            )
        for told in TREE_SCRIPTS:
            tree.update(run(tiny_model, plain, f"tree-{told}", prompt, 40)[1].accepted)
    assert chain == set(range(9))
    assert tree == set(range(5))


def test_every_right_draft_is_accepted(tiny_model, plain):
    _, answer, _ = run(tiny_model, plain, "chain-right", PROMPTS[0], 36)
    assert answer.accepted == [8] * 4
    assert answer.tau == 9
    _, answer, _ = run(tiny_model, plain, "tree-first", PROMPTS[0], 35)
    assert answer.accepted == [4] * 7
    assert answer.tau == 5
    _, answer, _ = run(tiny_model, plain, "tree-second", PROMPTS[0], 36)
    assert answer.accepted == [2] * 12


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
        for module, loop in ((decoding, "decode"), (speculative, "speculate")):
            if where == "loop":
                patch.setattr(module, loop, interrupt)
        if where == "prefill":
            patch.setattr(decoding, "prefill", interrupt)
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
        engine = Engine(tiny_model, Method("scripted", drafter, told, EXACT_ROWS), 1)
        request = make_request(tiny_model, 1, [prompt], 40, eos_ids=NEVER)
        state = engine.begin(request, engine.new_cache(256))
        state = engine.advance(state, rounds)
        length = int(state.decode.length[0])
        assert state.decode.history[0, :length].tolist() == truth[:length]
        expected = final_state(tiny_model, truth[: length - 1])
        np.testing.assert_allclose(state.drafter[0], expected, atol=1e-5)


def final_state(model, ids: list[int]):
    """Normalised final state of the last of the ids."""
    tokens = np.zeros((1, 256), np.int32)
    tokens[0, : len(ids)] = ids
    cache = init_cache(TINY, 1, 256, jnp.float32, unrolled=True)
    hidden, count = jnp.zeros((1, TINY.width)), np.array([len(ids)], np.int32)
    return decoding.prefill(TINY, model.params, cache, hidden, tokens, count)[1][0]


def test_right_drafts_are_accepted_past_every_chunk_and_cache_size(tiny_model):
    """Acceptance that falls behind some position would only show as slowness."""
    config = dataclasses.replace(TINY, context_length=600)
    model = dataclasses.replace(tiny_model, config=config)
    prompt = [index % 200 for index in range(230)]
    truth = prompt + run_one(model, PLAIN, prompt, 70).token_ids
    told = script([truth], pick=[0])
    method = Method("scripted", CHAIN, told, rows=EXACT_ROWS)
    (answer,), _ = Session(model, method).run([prompt], 64)
    assert answer.token_ids == truth[230:294]
    # The script ends inside the last round.
    assert set(answer.accepted[:-1]) == {CHAIN.layout.size - 1}

"""Tests of draft-verify decoding: the tokens of plain decoding (I4), ends, counts."""

import dataclasses

import pytest
from conftest import (
    PLAIN,
    TINY,
    run_one,
)
from draft_methods import (
    CHAIN,
    KINDS,
    METHODS,
    PROMPTS,
    SCRIPTS,
    TREE_SCRIPTS,
    assert_cache_is_fresh_prefill,
    assert_counts,
    every_kind,
    every_method,
    m2r2,
    run,
)
from scripted_drafters import accepted_depths, script

from m2r2_jax.drafters import PromptLookup
from m2r2_jax.drafters.methods import Method
from m2r2_jax.ops.execution import Execution
from m2r2_jax.serving.session import Session


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
    method = Method("lookup", PromptLookup(8, 3, 2))
    inexact = dataclasses.replace(tiny_model, execution=Execution())
    for prompt in PROMPTS:
        answer = run_one(inexact, method, prompt, 40)
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


def test_right_drafts_are_accepted_past_every_chunk_and_cache_size(tiny_model):
    """Acceptance that falls behind some position would only show as slowness."""
    config = dataclasses.replace(TINY, context_length=600)
    model = dataclasses.replace(tiny_model, config=config)
    prompt = [index % 200 for index in range(230)]
    truth = prompt + run_one(model, PLAIN, prompt, 70).token_ids
    told = script([truth], pick=[0])
    method = Method("scripted", CHAIN, told)
    (answer,), _ = Session(model, method).run([prompt], 64)
    assert answer.token_ids == truth[230:294]
    # The script ends inside the last round.
    assert set(answer.accepted[:-1]) == {CHAIN.layout.size - 1}

"""Tests of what each drafter proposes; `test_speculative` has what comes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from conftest import TINY, TINY_DECODER, tiny_accelerators, tiny_params, unrolled

from m2r2_jax.decoding import passes
from m2r2_jax.decoding.drafting import Context, Prefill
from m2r2_jax.decoding.sampling import Sampling
from m2r2_jax.decoding.settings import SamplingParams
from m2r2_jax.drafters import MultiRateChain, PromptLookup, RandomDraft
from m2r2_jax.drafters.draft_head import draft_head
from m2r2_jax.models import transformer
from m2r2_jax.models.cache import init_cache

GREEDY = Sampling.stack([SamplingParams()])


def context(text: list[int], cache=None, slots: int = 16) -> Context:
    """A row whose history ends with the text; what lies behind it is junk."""
    history = np.full((1, slots), text[-1], np.int32)
    history[0, : len(text)] = text
    length, root = jnp.array([len(text)]), jnp.array([text[-1]])
    return Context(jnp.asarray(history), length, root, cache, GREEDY)


def looked_up(text: list[int], **settings) -> list[int]:
    """Valid drafts of prompt lookup."""
    drafter = PromptLookup(**{"length": 4, "max_ngram": 3, "min_ngram": 2} | settings)
    proposal, _, _ = jax.jit(drafter.propose, static_argnums=0)(
        TINY_DECODER, {}, (), context(text)
    )
    assert proposal.tokens.shape == proposal.valid.shape == (1, 1 + drafter.length)
    assert proposal.tokens[0, 0] == text[-1] and proposal.valid[0, 0]
    valid = np.asarray(proposal.valid[0, 1:])
    assert not np.any(np.diff(valid.astype(int)) > 0), "valid drafts come first"
    return np.asarray(proposal.tokens[0, 1:])[valid].tolist()


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6]),
        ([1, 2, 3, 1, 2], [3, 1, 2]),  # Nothing is known behind the root.
        ([1, 2, 8, 1, 2, 9, 1, 2], [9, 1, 2]),  # The latest occurrence.
        ([5, 1, 2, 8, 6, 1, 2, 9, 5, 1, 2], [8, 6, 1, 2]),  # The longest n-gram.
        ([1, 1, 1], [1]),
        ([1, 2, 3, 4, 2], []),  # One token in common is too little.
        ([1, 2], []),
        ([1], []),
    ],
)
def test_prompt_lookup_copies_what_followed(text, drafts):
    assert looked_up(text) == drafts


def test_prompt_lookup_settings():
    text = [5, 1, 2, 8, 6, 1, 2, 9, 5, 1, 2]
    assert looked_up(text, max_ngram=2) == [9, 5, 1, 2]
    assert looked_up(text, length=2) == [8, 6]
    assert looked_up([1, 2, 3, 4, 2], min_ngram=1) == [3, 4, 2]


def test_prompt_lookup_finds_a_match_that_fills_the_history():
    text = [1, 2, *range(30, 42), 1, 2]
    assert len(text) == 16
    assert looked_up(text) == [30, 31, 32, 33]


def test_random_drafts_are_tokens_and_a_function_of_the_length():
    drafter = RandomDraft(50)

    def drafts(text):
        proposal, _, _ = drafter.propose(TINY_DECODER, {}, (), context(text))
        assert proposal.valid.all()
        return np.asarray(proposal.tokens[0, 1:])

    first = drafts([3, 4, 5])
    assert ((first >= 0) & (first < TINY.vocab_size)).all()
    assert len(set(first.tolist())) > 25
    np.testing.assert_array_equal(drafts([9, 9, 5]), first)
    assert (drafts([3, 4, 5, 5]) != first).any()


PARAMS = tiny_params()
TEXT = [5, 17, 42, 3, 9, 200, 31]


def normalise(x):
    return reference.rms_norm(x, np.float64(PARAMS["final_norm"]), TINY.norm_epsilon)


def m2r2_drafts(exit_layer: int, accelerators: dict, length: int):
    """Drafts by the description of the method, in numpy: tokens and confidences."""
    logits = reference.logits(TINY, PARAMS, TEXT[:-1])
    final = np.linalg.lstsq(np.float64(PARAMS["head"]), logits[-1], rcond=None)[0]
    text, states = list(TEXT), [np.zeros(TINY.width)] * (len(TEXT) - 1) + [final]
    confidences = []
    for _ in range(length):
        _, fast = reference.both_streams(
            TINY, PARAMS, accelerators, text, states, exit_layer
        )
        maps = jax.tree.map(lambda leaf: np.float64(leaf[0]), accelerators["exit"])
        own = normalise(fast[-1]) @ maps["own"]
        state = normalise(fast[-1] + own + states[-1] @ maps["carry"])
        weights = np.exp(np.float64(PARAMS["head"]) @ state)
        confidences.append(weights.max() / weights.sum())
        text.append(int(weights.argmax()))
        states.append(state)
    return text[len(TEXT) :], confidences


jitted_propose = jax.jit(MultiRateChain.propose, static_argnums=(0, 1))


def propose(drafter: MultiRateChain, accelerators: dict):
    params = unrolled(PARAMS)
    cache = init_cache(TINY, 1, 16, jnp.float32, unrolled=True)
    tokens = jnp.array([TEXT[:-1]])
    count, hidden = jnp.array([len(TEXT) - 1]), jnp.zeros((1, TINY.width))
    cache, hidden = passes.prefill(TINY_DECODER, params, cache, hidden, tokens, count)
    accelerators = {
        **accelerators,
        "layers": transformer.unroll(accelerators["layers"]),
    }
    head = draft_head(TINY, params)
    params = {"model": params, "accelerators": accelerators, "head": head}
    seen = context(TEXT, cache)
    read = Prefill(seen.history, seen.length, hidden)
    state = drafter.init(TINY_DECODER, params, read)
    proposal, _, after = jitted_propose(drafter, TINY_DECODER, params, state, seen)
    return proposal, cache, after


@pytest.mark.parametrize(
    ("exit_layer", "scale", "carry"), [(1, 0.0, 0.0), (2, 0.3, 0.5), (4, 0.0, 0.0)]
)
def test_m2r2_drafts_are_those_of_the_description(exit_layer, scale, carry):
    accelerators = tiny_accelerators(exit_layer, scale=scale, carry=carry)
    expected, _ = m2r2_drafts(exit_layer, accelerators, 3)
    proposal, before, after = propose(MultiRateChain(exit_layer, 3), accelerators)
    assert proposal.tokens[0].tolist() == [TEXT[-1], *expected]
    assert proposal.valid.all()
    slow, _ = reference.both_streams(
        TINY,
        PARAMS,
        accelerators,
        TEXT + expected,
        np.zeros((len(TEXT) + 3, TINY.width)),
        exit_layer,
    )
    np.testing.assert_allclose(proposal.hidden[0], slow[len(TEXT) - 1 :], atol=2e-5)
    np.testing.assert_array_equal(after.length, before.length)
    for layer in range(exit_layer, TINY.num_layers):
        np.testing.assert_array_equal(after.keys[layer], before.keys[layer])


def test_m2r2_with_the_last_layer_as_exit_drafts_the_models_own_text():
    """Zero accelerators at full depth are the model itself, without any saving."""
    accelerators = tiny_accelerators(4, scale=0.0, carry=0.0)
    proposal, _, _ = propose(MultiRateChain(4, 3), accelerators)
    text = list(TEXT)
    for _ in range(3):
        text.append(int(reference.logits(TINY, PARAMS, text)[-1].argmax()))
    assert proposal.tokens[0].tolist() == text[len(TEXT) - 1 :]


def test_m2r2_stops_behind_the_first_draft_without_confidence():
    accelerators = tiny_accelerators(2, scale=0.3, carry=0.5)
    expected, confidences = m2r2_drafts(2, accelerators, 6)
    # Above the second lowest confidence and below the third lowest.
    least = float(np.mean(sorted(confidences)[1:3]))
    drafter = MultiRateChain(2, 6, min_confidence=least)
    proposal, _, _ = propose(drafter, accelerators)
    count = [confidence >= least for confidence in confidences].index(False)
    assert 0 < count < 6
    assert proposal.valid[0].tolist() == [True] * (1 + count) + [False] * (6 - count)
    assert proposal.tokens[0, 1 : 1 + count].tolist() == expected[:count]

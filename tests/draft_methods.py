"""What the tests of draft-verify decoding share: methods by name, and checks.

Drafters of the library and scripted ones (see `scripted_drafters`) go through the same
tests; in exact mode each must give the tokens of plain decoding.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    TINY,
    TINY_DECODER,
    drawn,
    tiny_accelerators,
    tiny_params,
)
from scripted_drafters import ALL, NONE, Scripted, script

from m2r2_jax.decoding import passes
from m2r2_jax.decoding.drafting import Layout
from m2r2_jax.drafters import MultiRateChain, PromptLookup, RandomDraft
from m2r2_jax.drafters.draft_head import draft_head
from m2r2_jax.drafters.methods import Method
from m2r2_jax.models import transformer
from m2r2_jax.models.cache import init_cache
from m2r2_jax.serving.session import Session

PROMPTS = [[5, 17, 42, 3], [1, 1, 1], [7], [*range(100, 117)], [9, 8, 7, 6, 9, 8, 7]]
CHAIN = Scripted(Layout.chain(8))
TREE = Scripted(Layout((-1, 0, 0, 1, 1, 2, 2, 3, 7)))
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
    drafter = MultiRateChain(exit_layer, length, confidence)
    params = {"accelerators": accelerators, "head": draft_head(TINY, tiny_params())}
    return Method("m2r2", drafter, params)


def methods() -> dict:
    """By name: `truths -> Method`."""

    def fixed(drafter):
        return lambda truths: Method("fixed", drafter)

    def scripted(drafter, told):
        return lambda truths: Method("scripted", drafter, script(truths, **told))

    return {
        **{
            f"m2r2-{shape}-{kind}": lambda truths, a=(shape, kind): m2r2(*a)
            for shape in M2R2
            for kind in ACCELERATORS
        },
        "prompt_lookup": fixed(PromptLookup(8, 3, 2)),
        "random_draft": fixed(RandomDraft(5)),
        **{f"chain-{name}": scripted(CHAIN, told) for name, told in SCRIPTS.items()},
        **{f"tree-{name}": scripted(TREE, told) for name, told in TREE_SCRIPTS.items()},
    }


METHODS = methods()
# One of each kind, for tests that need not see every script.
KINDS = ["m2r2-2-carry", "prompt_lookup", "chain-mixed", "tree-moving"]
every_method = pytest.mark.parametrize("name", METHODS)
every_kind = pytest.mark.parametrize("name", KINDS)


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
    fresh, _ = passes.prefill(TINY_DECODER, params, fresh, hidden, tokens, counts)
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

"""The default model against transformers, which wrote `golden/greedy.json`.

`golden/make_golden.py` says how; its answers run past every end-of-sequence id.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from m2r2_jax.decoding import passes
from m2r2_jax.drafters.methods import build_method
from m2r2_jax.models import transformer
from m2r2_jax.models.cache import init_cache
from m2r2_jax.models.config import Decoder
from m2r2_jax.serving.session import Session

GOLDEN = Path(__file__).parent / "golden" / "greedy.json"
CASES = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
CAPACITY = 512
every_case = pytest.mark.parametrize(
    "index", range(len(CASES)), ids=[f"{len(c['prompt_ids'])}-ids" for c in CASES]
)


@pytest.fixture(scope="module")
def answers(default_model) -> list[list[int]]:
    """Greedy ids of all cases, from one session: the longest first makes the cache."""
    session = Session(default_model, build_method("autoregressive", default_model))
    found = {}
    for index in sorted(range(len(CASES)), key=lambda i: -len(CASES[i]["prompt_ids"])):
        (answer,), _ = session.run(
            [CASES[index]["prompt_ids"]], 128, eos_ids=frozenset()
        )
        found[index] = answer.token_ids
    assert session._cache.capacity == CAPACITY
    return [found[index] for index in range(len(CASES))]


@every_case
def test_greedy_ids_are_those_of_transformers(answers, index):
    expected = CASES[index]["greedy_ids"]
    assert len(expected) == 128
    assert answers[index] == expected


@every_case
def test_first_logits_are_those_of_transformers(default_model, index):
    ids, config = CASES[index]["prompt_ids"], default_model.config
    (size,) = passes.chunk_sizes(len(ids))
    tokens = np.zeros((1, size), np.int32)
    tokens[0, : len(ids)] = ids
    cache = init_cache(config, 1, CAPACITY, jnp.float32, unrolled=True)
    hidden, count = jnp.zeros((1, config.width)), np.array([len(ids)], np.int32)
    _, hidden = passes.prefill(
        Decoder(config), default_model.params, cache, hidden, tokens, count
    )
    logits = transformer.unembed(Decoder(config), default_model.params, hidden)[0]
    expected = CASES[index]["last_logits_head"]
    np.testing.assert_allclose(logits[: len(expected)], expected, atol=1e-3)


@every_case
def test_prompt_ids_are_those_of_transformers(default_model, index):
    case = CASES[index]
    assert default_model.tokenizer.encode_chat(case["messages"]) == case["prompt_ids"]

"""Every method gives the default model's own text (I4), on a few short answers.

The whole check, on real prompts and full-length answers, is
`python -m experiments.run --exp=mtbench --set exact=true`.
"""

import jax.numpy as jnp
import pytest

import m2r2_jax
from experiments.correctness import TIE
from experiments.margins import logit_margin
from experiments.metrics import first_difference
from m2r2_jax.drafters.methods import METHODS, build_method
from m2r2_jax.serving.session import Session

PROMPTS = [
    "Repeat this: The quick brown fox jumps over the lazy dog.",  # Copied in part.
    "Why does the moon change its shape?",
]
TOKENS = 32
# Without training M2R2 is never confident: here it drafts all the same.
SETTINGS = {"m2r2": {"length": 2, "min_confidence": 0.0}, "random_draft": {"length": 3}}


@pytest.fixture(scope="module")
def run(default_model):
    """Answers of one method."""

    def answers(name: str):
        settings = SETTINGS.get(name, {})
        method = build_method(name, default_model, **settings)
        session, found = Session(default_model.exact, method), []
        for prompt in PROMPTS:
            ids = default_model.tokenizer.encode_chat(
                [{"role": "user", "content": prompt}]
            )
            (answer,), _ = session.run([ids], TOKENS)
            found.append(answer)
        return found

    return answers


@pytest.fixture(scope="module")
def plain(run):
    return run("autoregressive")


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"autoregressive"}))
def test_i4_every_method_equals_plain_decoding(run, plain, name):
    answers = run(name)
    assert [a.token_ids for a in answers] == [a.token_ids for a in plain]
    assert [a.finish_reason for a in answers] == [a.finish_reason for a in plain]
    assert sum(sum(answer.proposed) for answer in answers) > 0
    if name == "prompt_lookup":
        assert sum(answers[0].accepted) > 0


@pytest.mark.parametrize("name", ["m2r2", "prompt_lookup"])
def test_in_bf16_answers_part_at_near_ties_only(name):
    """Products round with the number of rows: where answers part, margins are small."""
    model = m2r2_jax.load(dtype=jnp.bfloat16)
    for prompt in PROMPTS:
        ids = model.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        expected, found = (
            Session(model, build_method(method, model)).run([ids], TOKENS)[0][0]
            for method in ("autoregressive", name)
        )
        at = first_difference(found.token_ids, expected.token_ids)
        if at is not None:
            margin = logit_margin(model, ids + found.token_ids[:at])
            assert margin <= TIE["bf16"], f"token {at} of {prompt!r}: margin {margin}"

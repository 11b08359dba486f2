"""The settings of JAX that users turn on change no answer."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import NEVER, TINY_METHODS

from m2r2_jax.decoding.settings import SamplingParams
from m2r2_jax.ops.execution import EXACT, PLAIN, Execution
from m2r2_jax.ops.products import linear
from m2r2_jax.serving.session import Session

PROMPTS = [[5, 17, 42, 3], [1, 1, 1], [7, 8, 9, 7, 8, 9, 7]]
ROWS = [
    SamplingParams(logit_bias={4: -np.inf}, min_new_tokens=5),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=2**40),
    SamplingParams(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.3),
]
SETTINGS = {
    "wide": {"jax_enable_x64": True},
    "strict": {"jax_numpy_dtype_promotion": "strict"},
    "debug": {"jax_debug_nans": True, "jax_debug_infs": True},
}


@contextlib.contextmanager
def configured(settings: dict):
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def answers(model, method):
    session = Session(model, method, batch=len(PROMPTS))
    asked = {"sampling": ROWS, "logprobs": True, "eos_ids": NEVER}
    first, _ = session.run(PROMPTS, 20, **asked)
    turns = [
        [*prompt, *answer.token_ids, 3]
        for prompt, answer in zip(PROMPTS, first, strict=True)
    ]
    second, _ = session.run(turns, 5, **asked)
    return [answer.token_ids for answer in [*first, *second]]


@pytest.fixture(scope="module")
def expected(tiny_model):
    return answers(tiny_model, TINY_METHODS["plain"])


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("execution", [PLAIN, EXACT, Execution("fused", 16)])
def test_products_are_what_they_are_without(execution, settings):
    rng = np.random.default_rng(0)
    for rows, dtype in ((1, jnp.float32), (2, jnp.bfloat16), (9, jnp.float32)):
        x, weight = (jnp.asarray(rng.normal(size=(n, 32)), dtype) for n in (rows, 20))
        expected = linear(x, weight, execution)
        with configured(settings):
            found = jax.jit(linear, static_argnums=2)(x, weight, execution)
        assert found.dtype == dtype
        np.testing.assert_allclose(
            found.astype(jnp.float32), expected.astype(jnp.float32), rtol=1e-2, atol=0.1
        )


@pytest.mark.parametrize(
    ("method", "settings"),
    [(name, "wide") for name in TINY_METHODS] + [("m2r2", "strict"), ("m2r2", "debug")],
)
def test_answers_are_what_they_are_without(tiny_model, expected, method, settings):
    with configured(SETTINGS[settings]):
        assert answers(tiny_model, TINY_METHODS[method]) == expected

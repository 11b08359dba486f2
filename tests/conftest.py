"""Configs, tiny models and the fixtures that several test modules share."""

import dataclasses
import functools
import os
from pathlib import Path

# Before jax is imported: with libtpu installed, for its compiler, it would look for a
# TPU first.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import m2r2_jax
from m2r2_jax.checkpoints.fetch import default_model_file
from m2r2_jax.checkpoints.model import Model
from m2r2_jax.decoding.settings import SamplingParams
from m2r2_jax.drafters import MultiRateChain, PromptLookup
from m2r2_jax.drafters.draft_head import draft_head
from m2r2_jax.drafters.methods import Method
from m2r2_jax.models import multirate, transformer
from m2r2_jax.models.config import Decoder, ModelConfig
from m2r2_jax.ops.execution import EXACT
from m2r2_jax.serving.answers import Answer
from m2r2_jax.serving.session import Session

pytest.register_assert_rewrite("draft_methods")

SMOLLM2_135M = ModelConfig(
    name="SmolLM2-135M-Instruct",
    vocab_size=49_152,
    num_layers=30,
    width=576,
    hidden_width=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope_theta=100_000.0,
    norm_epsilon=1e-5,
    tied_head=True,
    context_length=8192,
)
# Its context and the nine rows of the widest layout in these tests fill the smallest
# cache of 256 slots to the last one. A tied head would repeat the last token for ever.
TINY = dataclasses.replace(
    SMOLLM2_135M,
    name="tiny",
    vocab_size=300,
    num_layers=4,
    width=48,
    hidden_width=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_length=247,
    tied_head=False,
)
# An id that no model emits: answers then never end early, and the shape of the set of
# ending ids, which programs depend on, is the same as with one real id.
NEVER = frozenset({TINY.vocab_size})
TINY_DECODER = Decoder(TINY)
PLAIN = Method("autoregressive")


class StubTokenizer:
    """Stands in for a tokenizer where no text is needed."""

    eos_ids = NEVER


def tiny_params(config: ModelConfig = TINY, *, seed: int = 2) -> dict:
    """Random stacked parameters of `init_params`'s tree.

    numpy fills it, since the initialisers compile for seconds. The spreads are chosen
    for texts that vary, repeat themselves at times, and have no near-ties; norms are
    not all ones.
    """
    rng = np.random.default_rng(seed)
    init = functools.partial(transformer.init_params, config)
    spreads = {"embed": 1.0, "head": 0.5}

    def fill(path, leaf):
        name = path[-1].key
        noise = rng.normal(size=leaf.shape)
        scaled = 1 + 0.1 * noise if "norm" in name else spreads.get(name, 0.08) * noise
        return jnp.asarray(scaled, leaf.dtype)

    shapes = jax.eval_shape(init, jax.random.key(0))
    return jax.tree_util.tree_map_with_path(fill, shapes)


def tiny_accelerators(
    exit_layer: int,
    *,
    scale: float,
    carry: float,
    rank: int = 3,
    seed: int = 0,
    config: ModelConfig = TINY,
) -> dict:
    """Stacked accelerators whose low-rank products are random.

    Args:
      exit_layer: X.
      scale: of the products in the layers; 0 as initialised.
      carry: of the maps of the carry and of the exit.
      rank: of every pair.
      seed: of the values.
      config: the model.
    """
    rng = np.random.default_rng(seed)
    rates = multirate.MultiRateConfig(exit_layer, rank)
    init = functools.partial(multirate.init_accelerators, config, rates)

    def fill(path, leaf):
        gain = carry if path[0].key in ("carry", "exit") else scale
        gain = 1 if path[-1].key == "down" else gain
        noise = rng.normal(size=leaf.shape) * leaf.shape[-2] ** -0.5
        return jnp.asarray(noise * gain, leaf.dtype)

    shapes = jax.eval_shape(init, jax.random.key(0))
    return jax.tree_util.tree_map_with_path(fill, shapes)


def tiny_chain() -> Method:
    """The M2R2 chain on random accelerators."""
    accelerators = tiny_accelerators(2, scale=0.3, carry=0.5)
    layers = transformer.unroll(accelerators["layers"])
    head = draft_head(TINY, tiny_params())
    params = {"accelerators": {**accelerators, "layers": layers}, "head": head}
    return Method("m2r2", MultiRateChain(2, 8, 0.3), params)


def unrolled(params: dict) -> dict:
    """The same parameters with one dict per layer."""
    return {**params, "blocks": transformer.unroll(params["blocks"])}


TINY_METHODS = {
    "plain": PLAIN,
    "prompt_lookup": Method("lookup", PromptLookup(8, 3, 2)),
    "m2r2": tiny_chain(),
}


def run_one(
    model: Model, method: Method, prompt: list[int], max_new_tokens: int, **settings
) -> Answer:
    """One answer of a fresh session; settings as for `drawn`."""
    settings = drawn(**settings)
    return Session(model, method).run([prompt], max_new_tokens, **settings)[0][0]


def drawn(*, temperature: float = 0.0, seed: int = 0, **settings) -> dict:
    """Settings of a run, temperature and seed in the place of `sampling`; an answer
    that reaches the end of the context is cut there.
    """
    how = SamplingParams(temperature=temperature, seed=seed)
    return {"sampling": how, "truncate": "answer", **settings}


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """A compiled program holds memory maps; those of all modules together are more
    than a process may have.
    """
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def tiny_model() -> Model:
    return Model(TINY, unrolled(tiny_params()), StubTokenizer(), execution=EXACT)


@pytest.fixture(scope="session")
def tiny_stacked_model() -> Model:
    return Model(TINY, tiny_params(), StubTokenizer(), execution=EXACT)


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    return default_model_file()


@pytest.fixture(scope="session")
def default_model(default_gguf) -> Model:
    del default_gguf
    return m2r2_jax.load()


@pytest.fixture(scope="session")
def plain(tiny_model):
    """Plain decoding of one prompt, remembered: `(prompt, count, **settings) -> ids`"""

    @functools.cache
    def ids(prompt, count, temperature, seed, eos_ids):
        settings = {"temperature": temperature, "seed": seed, "eos_ids": eos_ids}
        return run_one(tiny_model, PLAIN, list(prompt), count, **settings).token_ids

    def answer(prompt, count, temperature=0.0, seed=0, eos_ids=NEVER):
        return list(ids(tuple(prompt), count, temperature, seed, eos_ids))

    return answer

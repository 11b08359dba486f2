"""Every family against transformers, which wrote `golden/families`.

`golden/make_families.py` says how; `test_families_live.py` does the same without files.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import PLAIN, StubTokenizer, run_one, tiny_accelerators
from family_checks import (
    FOLDER,
    assert_cached_is,
    assert_uncached_is,
    golden,
    load_family,
    uncached,
)

from m2r2_jax.checkpoints.families import FAMILIES
from m2r2_jax.checkpoints.hugging_face import SafetensorsFolder
from m2r2_jax.checkpoints.model import Model
from m2r2_jax.drafters import MultiRateChain
from m2r2_jax.drafters.draft_head import draft_head
from m2r2_jax.drafters.methods import Method
from m2r2_jax.models import multirate, transformer
from m2r2_jax.models.config import Decoder
from m2r2_jax.ops.execution import EXACT

NAMES = sorted(path.name for path in FOLDER.iterdir())
SPACING = 401
# transformers rounds angles to f32: 2e-4 radians at these positions. With turns rounded
# so, the largest difference is 1e-4 instead of 2e-3.
FAR_TOLERANCE = 5e-3
every_family = pytest.mark.parametrize("name", NAMES)


def test_every_family_has_its_files():
    configs = [SafetensorsFolder(FOLDER / name).config for name in NAMES]
    types = {config["model_type"] for config in configs}
    assert types | {"gemma3"} == FAMILIES.keys()


@every_family
def test_logits_are_those_of_transformers(name):
    assert_uncached_is(FOLDER / name, golden(FOLDER / name))


@every_family
def test_cached_logits_of_ragged_rows_are_those_of_transformers(name):
    assert_cached_is(FOLDER / name, golden(FOLDER / name))


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
def test_scaled_turns_hold_at_far_positions(name):
    """Positions to 9,223; a context beyond its original takes LongRoPE's long table."""
    found = golden(FOLDER / name)
    config, params = load_family(FOLDER / name)
    config = dataclasses.replace(config, context_length=16_384)
    tokens = found["tokens"].astype(np.int32)
    position = SPACING * np.arange(tokens.shape[1])[None]
    logits = uncached(config, params, tokens, position)
    np.testing.assert_allclose(logits, found["far_logits"], atol=FAR_TOLERANCE)
    assert np.max(np.abs(found["far_logits"] - found["logits"])) > 1


@every_family
def test_rotary_frequencies_are_those_of_transformers(name):
    found = {
        key: value
        for key, value in golden(FOLDER / name).items()
        if key.startswith("frequencies")
    }
    config, _ = load_family(FOLDER / name)
    kinds = {bool(kind.window): kind.rope.frequencies for kind in config.layer_kinds}
    assert found
    for key, expected in found.items():
        windowed = "sliding" in key if len(found) > 1 else next(iter(kinds))
        np.testing.assert_allclose(kinds[windowed], expected, rtol=1e-6)


@every_family
def test_i1_and_i2_of_both_streams(name):
    config, params = load_family(FOLDER / name, unrolled=True)
    tokens = golden(FOLDER / name)["tokens"].astype(np.int32)

    def streams(scale):
        accelerators = tiny_accelerators(
            config.num_layers, scale=scale, carry=0.0, config=config
        )
        accelerators["layers"] = transformer.unroll(accelerators["layers"])
        return both_streams(config, params, accelerators, tokens)

    for (slow, fast), (again, other) in zip(streams(0.0), streams(0.5), strict=True):
        assert np.std(slow) > 0.01
        np.testing.assert_array_equal(fast, slow)
        np.testing.assert_array_equal(again, slow)  # I2
        assert np.any(other != slow)


@functools.partial(jax.jit, static_argnames="config")
def both_streams(config, params, accelerators, tokens):
    """h and p at every depth, above the embedding."""
    count = tokens.shape[1]
    position = jnp.arange(count)[None] + jnp.zeros((2, 1), jnp.int32)
    causal = jnp.tril(jnp.ones((2, count, count), bool))
    rows = transformer.rows_at(config, position, position, causal)
    slow = transformer.embed(config, params, tokens)
    fast = multirate.start(accelerators, slow, jnp.zeros_like(slow))
    x, found = jnp.concatenate([slow, fast], axis=1), []
    for layer in range(config.num_layers):
        x, _ = transformer.run_layers(
            Decoder(config),
            params["blocks"],
            x,
            transformer.with_fast_rows(rows),
            None,
            layer,
            layer + 1,
            accelerators["layers"],
        )
        found.append((x[:, :count], x[:, count:]))
    return found


def chain(config, params) -> Method:
    accelerators = tiny_accelerators(1, scale=0.2, carry=0.3, config=config)
    layers = transformer.unroll(accelerators["layers"])
    head = draft_head(config, params)
    params = {"accelerators": {**accelerators, "layers": layers}, "head": head}
    return Method("m2r2", MultiRateChain(1, 3, 0.0), params)


@pytest.mark.parametrize("name", ["gemma3", "qwen2_moe"])
def test_i4_drafts_change_no_token(name):
    """Past the windows, through the exact products; drawn, for tied heads repeat."""
    config, params = load_family(FOLDER / name, unrolled=True)
    model = Model(config, params, StubTokenizer(), execution=EXACT)
    prompt = golden(FOLDER / name)["tokens"][0, :9].tolist()
    settings = {"temperature": 0.9, "seed": 5}
    plain = run_one(model, PLAIN, prompt, 24, **settings)
    assert len(set(plain.token_ids)) > 8
    answer = run_one(model, chain(config, params), prompt, 24, **settings)
    assert answer.token_ids == plain.token_ids
    assert sum(answer.proposed) > 0

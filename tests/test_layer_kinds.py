"""Windows, rows of the vocabulary without a text, and heads that scale their logits."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, TINY_DECODER, tiny_params
from family_checks import FOLDER, load_family

from m2r2_jax.decoding.drafting import Layout
from m2r2_jax.drafters.draft_head import draft_head
from m2r2_jax.models import transformer
from m2r2_jax.models.cache import init_cache
from m2r2_jax.models.config import Decoder
from m2r2_jax.models.sharding import RULES
from m2r2_jax.models.transformer import Rows

WINDOWED = dataclasses.replace(TINY, windows=(0, 4, 4, 0), window_rope_theta=100.0)


def cached(config, layout: Layout, length: int, capacity: int) -> Rows:
    cache = init_cache(config, 1, capacity, jnp.float32, unrolled=True)
    cache = cache.replace(length=jnp.array([length]))
    return transformer.cached_rows(config, cache, layout.offset, layout.mask)


def written_out(*rows: str) -> np.ndarray:
    return np.array([[slot == "x" for slot in row] for row in rows])


def test_a_window_counts_the_token_itself():
    """[transformers#29623, vllm#9679] A window of four over ten tokens: four keys."""
    expected = written_out(
        "x.........",
        "xx........",
        "xxx.......",
        "xxxx......",
        ".xxxx.....",
        "..xxxx....",
        "...xxxx...",
        "....xxxx..",
        ".....xxxx.",
        "......xxxx",
    )
    rows = cached(WINDOWED, Layout.chain(9), 0, 10)
    np.testing.assert_array_equal(rows.view(WINDOWED, 1).mask[0], expected)
    whole = rows.view(WINDOWED, 0).mask[0]
    np.testing.assert_array_equal(whole, np.tril(np.ones((10, 10), bool)))


def test_a_window_counts_positions_in_a_tree():
    """Rows 1 and 2 are both children of the root; a window of four over five."""
    rows = cached(WINDOWED, Layout((-1, 0, 0, 1, 2)), 2, 8)
    expected = written_out(
        "xxx.....",
        "xxxx....",
        "xxx.x...",
        ".xxx.x..",
        ".xx.x.x.",
    )
    np.testing.assert_array_equal(rows.view(WINDOWED, 2).mask[0], expected)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_traced_layer_sees_what_its_index_does(layer):
    rows = cached(WINDOWED, Layout.chain(5), 3, 16)
    static = rows.view(WINDOWED, layer)
    traced = rows.view(WINDOWED, jnp.int32(layer))
    np.testing.assert_array_equal(traced.mask, static.mask)
    np.testing.assert_array_equal(traced.turns[0], static.turns[0])
    other = rows.view(WINDOWED, 1 - layer)
    assert np.any(np.asarray(other.turns[0]) != np.asarray(static.turns[0]))


def test_layers_of_one_kind_share_one_mask():
    windows = (4,) * TINY.num_layers
    assert len(dataclasses.replace(TINY, windows=windows).layer_kinds) == 1
    assert len(TINY.layer_kinds) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"windows": (4,)}, "1 windows for 4 layers"),
        ({"norms": "between"}, "norms 'between' is unknown.*after"),
        ({"qk_norm": "all"}, "qk_norm 'all' is unknown"),
        ({"activation": "relu"}, "activation 'relu' is unknown.*gelu_tanh"),
        ({"rotary_dim": 3}, "rotary_dim 3 is odd"),
    ],
)
def test_impossible_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


def test_ids_without_a_text_are_never_chosen():
    """[Qwen3#885, transformers#35797] The embedding has more rows than the tokenizer:
    the model's choice, and drafts, come from the others."""
    config, params = dataclasses.replace(TINY, decodable=290), tiny_params()
    states = jnp.asarray(np.random.default_rng(0).normal(size=(500, TINY.width)))
    free = transformer.unembed(TINY_DECODER, params, states)
    logits = transformer.unembed(Decoder(config), params, states)
    assert np.any(jnp.argmax(free, axis=-1) >= 290)
    assert np.all(jnp.argmax(logits, axis=-1) < 290)
    assert np.all(np.isneginf(logits[:, 290:]))
    np.testing.assert_array_equal(logits[:, :290], free[:, :290])
    head = draft_head(config, params)
    assert head.ids.max() == 289 and head.weight.shape[0] == 290
    np.testing.assert_array_equal(head.slot[290:], -1)


def test_drafts_have_the_models_own_logits():
    """[mistral.rs#486] Multiplier and cap hold in the draft head as in the model's."""
    config = dataclasses.replace(TINY, logit_multiplier=0.25, logit_cap=2.0)
    states = jnp.asarray(np.random.default_rng(0).normal(size=(3, TINY.width)))
    expected = transformer.unembed(Decoder(config), tiny_params(), states)
    assert np.max(np.abs(expected)) < 2.0
    ids = np.array([5, 7, 11])
    head = draft_head(config, tiny_params(), ids)
    np.testing.assert_allclose(head.logits(states), expected[:, ids], atol=1e-6)


def test_every_axis_of_a_familys_weights_has_a_rule():

    for path in FOLDER.iterdir():
        specs = transformer.weight_specs(load_family(path)[0])
        for spec in (*specs.pop("blocks").values(), *specs.values()):
            assert set(spec.axes) <= RULES.keys()
            assert len(spec.axes) == len(spec.shape)

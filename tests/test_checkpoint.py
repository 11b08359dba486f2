"""Tests of loading GGUF files, written here by the format's own package."""

import dataclasses

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, tiny_params, unrolled
from gguf_files import tensors_of, write

import m2r2_jax
from m2r2_jax.checkpoints.gguf import config_from_gguf, load_gguf_params
from m2r2_jax.checkpoints.gguf_file import GGUFFile
from m2r2_jax.models import transformer

# Quantised rows are whole blocks of 32.
CONFIG = dataclasses.replace(TINY, width=64, num_layers=2)
Q8_0, Q4_1 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1
forward = jax.jit(transformer.forward, static_argnums=0)


@pytest.fixture
def written(tmp_path):
    """Writes the tiny model: `(changes of its tensors, **how) -> path`."""
    tensors = tensors_of(CONFIG, tiny_params(CONFIG))

    def write_changed(changes=None, **how):
        changed = tensors | (changes or {})
        kept = {name: t for name, t in changed.items() if t is not None}
        return write(tmp_path / "tiny.gguf", CONFIG, kept, **how)

    return write_changed


def load(path, *, unrolled=False, dtype=jnp.float32):
    file = GGUFFile(path)
    config = config_from_gguf(file)
    return config, load_gguf_params(file, config, dtype, unrolled=unrolled)


def assert_same_model(config, loaded, expected):
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)
    tokens = np.arange(40, 52)[None]
    np.testing.assert_allclose(
        forward(config, loaded, tokens), forward(config, expected, tokens), atol=1e-5
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_f32_file_gives_the_model_it_was_written_from(tmp_path, tied, kv_heads):
    config = dataclasses.replace(CONFIG, tied_head=tied, num_kv_heads=kv_heads)
    params = tiny_params(config)
    path = write(tmp_path / "tiny.gguf", config, tensors_of(config, params))
    found, loaded = load(path)
    assert dataclasses.replace(found, name=config.name) == dataclasses.replace(
        config,
        rope_theta=pytest.approx(config.rope_theta),
        norm_epsilon=pytest.approx(config.norm_epsilon),
    )
    assert_same_model(config, loaded, params)


@pytest.mark.parametrize("kind", [Q8_0, Q4_1])
def test_quantised_file_gives_the_dequantised_model(written, kind):
    def rounded(weight):
        if weight.ndim == 1 or weight.ndim == 2 and len(weight) == CONFIG.num_layers:
            return weight  # Norms, stacked or not.
        rows = np.asarray(weight).reshape(-1, weight.shape[-1])
        values = gguf.dequantize(gguf.quantize(rows, kind), kind)
        return jnp.asarray(values.reshape(weight.shape))

    params = tiny_params(CONFIG)
    expected = jax.tree.map(rounded, params)
    assert np.any(np.asarray(expected["embed"]) != np.asarray(params["embed"]))
    config, loaded = load(written(kind=kind))
    assert_same_model(config, loaded, expected)


def test_unrolled_load_equals_stacked_load(written):
    path = written()
    _, stacked = load(path)
    _, layers = load(path, unrolled=True)
    assert isinstance(layers["blocks"], tuple)
    jax.tree.map(np.testing.assert_array_equal, layers, unrolled(stacked))


def test_weights_are_cast_on_the_way(written):
    _, loaded = load(written(), dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype("bfloat16")}


def test_place_is_given_every_weight_with_its_axes(written):
    file = GGUFFile(written())
    seen = []

    def place(array, axes):
        assert array.ndim == len(axes)
        seen.append(axes)
        return jnp.asarray(array)

    load_gguf_params(file, CONFIG, jnp.float32, unrolled=True, place=place)
    assert len(seen) == 3 + 6 * CONFIG.num_layers


def test_unknown_and_missing_tensors_are_listed_together(written):
    extra = np.zeros((2, 2), np.float32)
    path = written(
        {
            "blk.0.attn_k.weight": None,
            "output_norm.weight": None,
            "blk.1.attn_q.bias": extra,
            "rope_freqs.weight": extra,
        }
    )
    with pytest.raises(ValueError) as caught:
        load(path)
    missing, unknown = str(caught.value).split("unknown tensors")
    assert str(path) in missing
    assert "blk.*.attn_k.weight" in missing and "output_norm.weight" in missing
    assert "blk.*.attn_q.bias" in unknown and "rope_freqs.weight" in unknown


def test_file_without_embedding_is_refused(written):
    with pytest.raises(ValueError, match=r"missing tensors token_embd\.weight"):
        load(written({"token_embd.weight": None}))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.1.attn_output.weight", (64, 32)),
        ("blk.1.attn_q.weight", (32, 64)),
        ("blk.0.attn_k.weight", (20, 64)),
        ("blk.0.attn_v.weight", (32, 32)),
        ("blk.0.ffn_up.weight", (64, 64)),
        ("output_norm.weight", (32,)),
    ],
)
def test_wrong_shape_names_the_tensor(written, name, shape):
    path = written({name: np.zeros(shape, np.float32)})
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        load(path)


@pytest.mark.parametrize("share", [0, 1e-5, 0.001, 0.01, 0.5, 0.999])
def test_truncated_file_is_named(written, share):
    path = written()
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match="tiny.gguf"):
        load(path)


def test_other_content_is_named(tmp_path):
    path = tmp_path / "page.gguf"
    path.write_text("<html>not found</html>" * 100)
    with pytest.raises(ValueError, match="page.gguf"):
        GGUFFile(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.gguf"):
        m2r2_jax.load(tmp_path / "nowhere.gguf")


def test_other_architectures_are_refused_with_what_is_supported(written):
    with pytest.raises(ValueError, match="architecture is 'gemma3': must be llama"):
        load(written(architecture="gemma3"))

"""Tests of loading GGUF files, written here by the format's own package."""

import dataclasses

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, tiny_params, unrolled
from gguf_files import spoil_tensor, tensors_of, write
from tiny_chat import METADATA

import m2r2_jax
from m2r2_jax.checkpoints.gguf import config_from_gguf, describe, load_gguf_params
from m2r2_jax.checkpoints.gguf_file import GGUFFile
from m2r2_jax.models import transformer
from m2r2_jax.models.config import Decoder

# Quantised rows are whole blocks of 32.
CONFIG = dataclasses.replace(TINY, width=64, num_layers=2)
Q8_0, Q4_1 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1
F16, BF16 = gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16
F32 = gguf.GGMLQuantizationType.F32
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
        *(forward(Decoder(config), tree, tokens) for tree in (loaded, expected)),
        atol=1e-5,
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


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("block_count", "2", "must be a whole number"),
        ("block_count", 0, "must be from 1"),
        ("block_count", 500, "must be at most 21, the tensors of the file"),
        ("block_count", None, "is missing"),
        ("context_length", 0, "must be from 1"),
        ("embedding_length", 2.5, "must be a whole number"),
        ("feed_forward_length", [96, 64], "the same for every layer"),
        ("attention.head_count", 0, "must be from 1"),
        ("attention.head_count", True, "must be a whole number"),
        ("attention.head_count_kv", 0, "must be from 1"),
        ("attention.head_count_kv", 3, "must divide the 4 query heads"),
        ("attention.head_count_kv", [2, 1], "the same for every layer"),
        ("attention.key_length", 15, "must be even"),
        ("attention.value_length", 8, "must be attention.key_length 16"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "must be from"),
        ("rope.freq_base", 0.0, "must be from 1"),
        ("rope.dimension_count", 8, "must be the head's width 16"),
        ("rope.scaling.type", "yarn", "must be none or linear"),
        ("rope.scaling.factor", 4.0, "rotary scaling"),
        ("rope.scale_linear", 2.0, "rotary scaling"),
        ("rope.scaling.attn_factor", 0.5, "not supported"),
        ("attention.sliding_window", 64, "sliding windows are not supported"),
        ("attention.causal", False, "encoders are not supported"),
        ("attention.scale", 0.5, "one over the root of the head's width"),
        ("expert_count", 8, "Mixture-of-Experts"),
        ("final_logit_softcapping", 30.0, "not supported"),
        ("attention.new_trick", 1, "not known here"),
    ],
)
def test_metadata_that_is_not_served_is_refused_by_key(written, key, value, words):
    path = written(metadata={f"llama.{key}": value})
    with pytest.raises(ValueError) as caught:
        load(path)
    _, *problems = str(caught.value).split("\n  ")
    (problem,) = [line for line in problems if line.startswith(f"llama.{key} is ")]
    assert words in problem and "tiny.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("general.alignment", 48, "48 is no power of two"),
        ("general.name", 5, "is 5: must be text"),
        ("split.count", 3, "is 3: must be 0 or 1; join the parts"),
    ],
)
def test_keys_of_the_file_itself_are_checked(written, key, value, words):
    with pytest.raises(ValueError, match=f"{key} {words}"):
        load(written(metadata={key: value}))


@pytest.mark.parametrize(
    "metadata",
    [
        {"expert_count": 0, "expert_used_count": 0},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
        {"rope.scaling.type": "none", "rope.scaling.factor": 8.0},
        {"rope.scale_linear": 1.0, "rope.dimension_count": 16},
        {"attention.head_count": [4, 4], "attention.head_count_kv": [2, 2]},
        {"feed_forward_length": [96, 96], "rope.freq_base": 100_000},
        {"attention.sliding_window": 4096, "attention.causal": True},
        {"attention.scale": 0.25, "logit_scale": 1.0, "attention.value_length": 16},
        {"vocab_size": 300, "tensor_data_layout": "Meta AI original pth"},
    ],
)
def test_metadata_that_changes_nothing_is_served(written, metadata):
    expected, _ = load(written())
    found, _ = load(written(metadata={f"llama.{k}": v for k, v in metadata.items()}))
    assert found == expected


def test_all_problems_of_a_file_are_reported_together(written):
    path = written(
        {"blk.1.ffn_up.weight": np.zeros((64, 64), np.float32)},
        metadata=METADATA
        | {
            "llama.expert_count": 8,
            "llama.rope.dimension_count": 4,
            "tokenizer.ggml.eos_token_id": 10**6,
        },
    )
    spoil_tensor(path, "blk.0.attn_q.weight", kind=4)
    with pytest.raises(ValueError) as caught:
        describe(GGUFFile(path))
    for words in (
        "tiny.gguf",
        "blk.0.attn_q.weight",
        "blk.1.ffn_up.weight",
        "expert_count is 8",
        "dimension_count is 4",
        "eos_token_id is 1000000",
    ):
        assert words in str(caught.value)


def test_more_tokens_than_rows_of_the_embedding_are_refused(written):
    tokens = [*METADATA["tokenizer.ggml.tokens"], "one more"]
    types = [*METADATA["tokenizer.ggml.token_type"], 1]
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    describe(GGUFFile(written(metadata=METADATA)))
    with pytest.raises(ValueError, match=r"ggml\.tokens is .*at most 300 tokens"):
        describe(GGUFFile(written(metadata=METADATA | changed)))


@pytest.mark.parametrize("kind", [F32, F16, BF16, Q8_0])
def test_big_endian_files_are_refused(written, kind):
    with pytest.raises(ValueError, match="big-endian.*gguf-convert-endian"):
        load(written(kind=kind, big=True))


@pytest.mark.parametrize("kind", [4, 31, 24, 99])  # removed twice, of integers, unknown
def test_types_that_cannot_be_read_are_named(written, kind):
    path = written()
    spoil_tensor(path, "blk.0.ffn_up.weight", kind=kind)
    with pytest.raises(
        ValueError, match="'blk.0.ffn_up.weight' is of type .*F32.*Q4_0"
    ) as e:
        load(path)
    assert "incomplete" not in str(e.value)


def test_offsets_that_are_not_aligned_are_refused(written):
    path = written()
    spoil_tensor(path, "blk.0.ffn_up.weight", offset=4)
    with pytest.raises(ValueError, match="'blk.0.ffn_up.weight' has offset 4 and not"):
        load(path)


def test_a_cut_file_is_told_by_the_bytes_it_should_have(written):
    path = written()
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    sizes = f"need {len(content):,} bytes and the file has {len(content) - 100:,}"
    with pytest.raises(ValueError, match=f"{sizes}: an incomplete download"):
        load(path)


def test_a_path_may_start_at_home(written, monkeypatch):
    path = written()
    monkeypatch.setenv("HOME", str(path.parent))
    assert GGUFFile("~/tiny.gguf").path == path


def test_a_folder_is_told_what_is_supported(written):
    folder = written().parent
    with pytest.raises(ValueError, match="is a folder.*one GGUF file.*tiny.gguf"):
        GGUFFile(folder)

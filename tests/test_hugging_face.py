"""Folders in Hugging Face's form: what their configs and files say, and what is wrong.

The folders are those of `golden/families`, changed. Numbers in brackets are of public
reports of loaders that got it wrong.
"""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from family_checks import FOLDER, load_family
from safetensors.numpy import load_file, save_file

from m2r2_jax.checkpoints.families import FAMILIES, model_config
from m2r2_jax.checkpoints.hugging_face import (
    SafetensorsFolder,
    config_and_weights,
    load_folder_params,
)
from m2r2_jax.models.rotary import Linear, Llama3, LongRope, Yarn

INDEX = "model.safetensors.index.json"


def raw_config(name: str, drop: tuple[str, ...] = (), **changes) -> dict:
    raw = json.loads((FOLDER / name / "config.json").read_text())
    return {k: v for k, v in {**raw, **changes}.items() if k not in drop}


def config_of(name: str, drop: tuple[str, ...] = (), **changes):
    there = SafetensorsFolder(FOLDER / name).names()
    return model_config(name, raw_config(name, drop, **changes), there)


@pytest.fixture
def folder(tmp_path):
    """Makes a folder of a family: `(family, tensors, drop, **changes of the config)`"""

    def make(name, tensors=None, drop=(), files=None, **changes):
        raw = raw_config(name, drop, **changes)
        (tmp_path / "config.json").write_text(json.dumps(raw))
        tensors = tensors_of(name) if tensors is None else tensors
        for file, names in (files or {"model.safetensors": list(tensors)}).items():
            save_file({n: tensors[n] for n in names}, tmp_path / file)
        return tmp_path

    return make


def tensors_of(name: str) -> dict[str, np.ndarray]:
    return load_file(FOLDER / name / "model.safetensors")


def params_of(path, dtype=jnp.float32, stream_dtype=None):
    return load_folder_params(
        SafetensorsFolder(path),
        dtype,
        unrolled=False,
        stream_dtype=stream_dtype or dtype,
        place=lambda array, axes: jnp.asarray(array),
    )[1]


def assert_same_params(path, name: str) -> None:
    jax.tree.map(
        np.testing.assert_array_equal, params_of(path), load_family(FOLDER / name)[1]
    )


# Configs.


def test_unknown_model_type_is_refused_with_those_supported():
    message = rf"'gpt2' is not supported; supported: {', '.join(sorted(FAMILIES))}"
    with pytest.raises(ValueError, match=message):
        config_of("llama", model_type="gpt2")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"sliding_window": 6}),
        ("llama", {"final_logit_softcapping": 30.0}),
        ("llama", {"quantization_config": {"bits": 4}}),
        ("olmoe", {"clip_qkv": 8.0}),
        ("gemma3", {"use_bidirectional_attention": True}),
        ("mistral", {"num_local_experts": 4}),
    ],
)
def test_keys_that_change_the_maths_are_refused_by_name(name, changes):
    (key,) = changes
    with pytest.raises(ValueError, match=f"{key}={str(changes[key])[:6]}"):
        config_of(name, **changes)


def test_keys_that_change_nothing_are_taken():
    changes = {"clip_qkv": None, "quantization_config": {}, "residual_multiplier": 1.0}
    assert config_of("llama", **changes) == config_of("llama")


def test_partly_dense_mixtures_are_refused():
    with pytest.raises(ValueError, match=r"mlp_only_layers \[0\].*partly dense"):
        config_of("qwen3_moe", mlp_only_layers=[0])


@pytest.mark.parametrize("key", ["hidden_size", "rms_norm_eps", "num_experts_per_tok"])
def test_missing_key_is_named(key):
    with pytest.raises(ValueError, match=f"no key {key}"):
        config_of("olmoe", drop=(key,))


def test_theta_that_is_nowhere_is_refused_unless_the_family_has_a_default():
    with pytest.raises(ValueError, match="no key rope_theta"):
        config_of("mistral", drop=("rope_parameters",))
    assert config_of("llama", drop=("rope_parameters",)).rope_theta == 10_000


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "kind",
    [
        {"rope_type": "llama3"},
        {"type": "llama3"},
        {"rope_type": "llama3", "type": "llama3"},
    ],
)
def test_older_scaling_keys_are_read_under_either_name(kind):
    """[llama3#299, mlxcel#1386]"""
    found = config_of(
        "llama",
        drop=("rope_parameters",),
        rope_scaling={**LLAMA3, **kind},
        rope_theta=5e5,
    )
    assert found.rope_scaling == Llama3(8.0, 1.0, 4.0, 64)
    assert found.rope_theta == 5e5


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not supported.*yarn"),
        ({"rope_type": "linear"}, "'linear' has no key 'factor'"),
        ({"rope_type": "linear", "factor": 2.0, "mrope_section": [1]}, "mrope_section"),
    ],
)
def test_scaling_that_is_not_supported_is_named(scaling, message):
    with pytest.raises(ValueError, match=message):
        config_of("llama", rope_parameters={"rope_theta": 1e4, **scaling})


def test_yarn_takes_a_given_attention_factor_and_else_computes_it():
    """[mlx-lm#1507, sglang#33558]"""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    given = config_of("qwen3", rope_parameters={"rope_theta": 1e4, **yarn})
    assert given.rope_scaling == Yarn(4.0, 512, pytest.approx(1.1386294))
    assert config_of("qwen3").rope_scaling.attention_factor == 1.0


def test_longrope_is_used_up_to_its_original_context():
    """[mlxcel#1358, unsloth#1193] Beyond it requests are refused."""
    found = config_of("phi3")
    assert isinstance(found.rope_scaling, LongRope)
    assert found.context_length == 32
    older = raw_config("phi3")["rope_parameters"]
    theta, part = older.pop("rope_theta"), older.pop("partial_rotary_factor")
    del older["rope_type"], older["original_max_position_embeddings"]
    older["type"] = "su"
    again = config_of(
        "phi3",
        drop=("rope_parameters",),
        rope_scaling=older,
        rope_theta=theta,
        partial_rotary_factor=part,
    )
    assert again == found


def test_gemma3_scales_layers_without_a_window_only():
    """[mlxcel#1340, marin#7156] In the nested form and the older one."""
    older = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    }
    nested = config_of("gemma3")
    assert config_of("gemma3", ("rope_parameters", "layer_types"), **older) == nested
    windowed, whole = nested.layer_kinds
    assert (windowed.window, windowed.rope.theta, windowed.rope.scaling) == (
        6,
        1e4,
        None,
    )
    assert (whole.window, whole.rope.theta, whole.rope.scaling) == (0, 1e6, Linear(8.0))
    assert nested.kind_of_layer == (0, 0, 1)


def test_gemma3_files_may_leave_out_most_of_the_config():
    """[transformers#36683] The sizes of the 4B model's `text_config` alone."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    raw = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    found = model_config("4b", raw, set())
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (8, 4, 256)
    assert found.tied_head and found.vocab_size == 262_208
    assert found.windows == ((1024,) * 5 + (0,)) * 5 + (1024,) * 4
    assert (found.rope_theta, found.window_rope_theta) == (1e6, 1e4)


def test_scale_of_scores_is_its_own_number():
    """[llama.cpp#8444] And not the head's width."""
    found = config_of("gemma2", query_pre_attn_scalar=144)
    assert found.attention_scale == pytest.approx(1 / 12)
    assert found.head_dim == 16


def test_head_dim_that_is_null_is_width_over_heads():
    """[lmdeploy#2761]"""
    assert config_of("mistral", head_dim=None).head_dim == 8
    assert config_of("mistral").head_dim == 16


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": False}, ()),
        ({"sliding_window": None}, ()),
        ({"max_window_layers": 2}, ()),
        ({"max_window_layers": 0}, (6, 6)),
        ({}, (0, 6)),
    ],
)
def test_qwen_windows_are_off_unless_enabled_and_for_late_layers(changes, windows):
    """[transformers#38002, lmdeploy#3614]"""
    assert config_of("qwen2", drop=("layer_types",), **changes).windows == windows


def test_window_as_wide_as_the_context_is_none():
    assert config_of("mistral", sliding_window=16_384).windows == ()
    assert config_of("mistral", sliding_window=16_383).windows == (16_383,) * 2


def test_head_is_tied_where_the_config_says_so_or_the_file_has_none():
    names = SafetensorsFolder(FOLDER / "llama").names()
    raw = raw_config("llama", drop=("tie_word_embeddings",))
    assert not model_config("", raw, names).tied_head
    assert model_config("", raw, names - {"lm_head.weight"}).tied_head


# Files.


def test_tensors_keep_their_bf16_and_are_cast_on_the_way(folder):
    """[safetensors#598] Norms stay in f32: 1 + w has more digits than bf16."""
    path = folder("gemma3")
    opened = SafetensorsFolder(path)
    name = "model.layers.0.input_layernorm.weight"
    stored = opened.read(name)
    assert stored.dtype == ml_dtypes.bfloat16
    params = params_of(path, jnp.bfloat16)
    assert params["embed"].dtype == params["blocks"]["qkv"].dtype == jnp.bfloat16
    norm = params["blocks"]["attention_norm"][0]
    np.testing.assert_array_equal(norm, np.float32(stored) + 1)
    mixed = params_of(path, jnp.bfloat16, jnp.float32)
    assert mixed["embed"].dtype == jnp.float32
    assert mixed["blocks"]["down"].dtype == jnp.bfloat16


@pytest.mark.parametrize("wrapper", ["language_model.model.", "model.language_model."])
def test_wrapped_names_are_the_language_models(folder, wrapper):
    """[vllm#15031, transformers#45953] Vision is left alone."""
    tensors = {
        wrapper + name.removeprefix("model."): tensor
        for name, tensor in tensors_of("gemma3").items()
    }
    tensors["vision_tower.patch.weight"] = np.zeros((2, 2), np.float32)
    tensors["multi_modal_projector.weight"] = np.zeros((2, 2), np.float32)
    path = folder("gemma3", tensors)
    raw = {"model_type": "gemma3", "text_config": raw_config("gemma3")}
    (path / "config.json").write_text(json.dumps(raw))
    assert_same_params(path, "gemma3")


def test_fused_experts_are_those_one_by_one(folder):
    tensors, experts = tensors_of("olmoe"), range(6)
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."

        def pop(name, prefix=prefix):
            return [tensors.pop(f"{prefix}{e}.{name}_proj.weight") for e in experts]

        gates, ups, downs = (np.stack(pop(name)) for name in ("gate", "up", "down"))
        tensors[f"{prefix}gate_up_proj"] = np.concatenate([gates, ups], axis=1)
        tensors[f"{prefix}down_proj"] = downs
    assert_same_params(folder("olmoe", tensors), "olmoe")


def shards(name: str) -> dict[str, list[str]]:
    names = sorted(tensors_of(name))
    return {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}


def index_of(files: dict[str, list[str]]) -> str:
    return json.dumps(
        {"weight_map": {n: f for f, names in files.items() for n in names}}
    )


@pytest.mark.parametrize("indexed", [True, False])
def test_shards_are_read_with_and_without_an_index(folder, indexed):
    path = folder("llama", files=shards("llama"))
    if indexed:
        (path / INDEX).write_text(index_of(shards("llama")))
    assert_same_params(path, "llama")


@pytest.mark.parametrize("indexed", [True, False])
def test_missing_shard_is_named(folder, indexed):
    """[sglang#32279, mlx-vlm#1827]"""
    path = folder("llama", files=shards("llama"))
    if indexed:
        (path / INDEX).write_text(index_of(shards("llama")))
    (path / "model-00002-of-00003.safetensors").unlink()
    message = "lacks model-00002-of-00003.safetensors; an incomplete download?"
    with pytest.raises(FileNotFoundError, match=message):
        SafetensorsFolder(path)


def test_index_of_another_download_is_refused(folder):
    files = shards("llama")
    path = folder("llama", files=files)
    first = next(iter(files))
    files[first] = [*files[first], "model.layers.7.mlp.down_proj.weight"]
    (path / INDEX).write_text(index_of(files))
    with pytest.raises(ValueError, match=r"layers\.7\.mlp.*different downloads"):
        SafetensorsFolder(path)


@pytest.mark.parametrize("indexed", [True, False])
def test_stray_files_are_left_alone(folder, indexed):
    """[gpustack#2257, vllm#40765]"""
    path = folder("llama", files=shards("llama"))
    stray = {"layers.0.attention.wq.weight": np.zeros((2, 2), np.float32)}
    save_file(stray, path / "consolidated.safetensors")
    if indexed:
        (path / INDEX).write_text(index_of(shards("llama")))
        save_file(stray, path / "model-extra.safetensors")
    assert_same_params(path, "llama")


def test_second_copy_is_refused_with_both_files(folder):
    path = folder("llama")
    shutil.copy(path / "model.safetensors", path / "model_old.safetensors")
    with pytest.raises(ValueError, match=r"both model\.safetensors and model_old"):
        SafetensorsFolder(path)


@pytest.mark.parametrize("cut", [3, 40_000, 45_000])
def test_truncated_file_is_refused_with_its_path(folder, cut):
    """[ComfyUI#6744]"""
    path = folder("llama")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(ValueError, match=r"model\.safetensors.*incomplete download"):
        SafetensorsFolder(path)


def test_folders_without_what_is_needed_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder at"):
        SafetensorsFolder(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin.*safetensors are"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        SafetensorsFolder(tmp_path)


def test_all_tensors_that_do_not_fit_are_listed_together(folder):
    """[transformers#45953] Nothing is ever left at random values."""
    tensors = tensors_of("qwen2")
    del tensors["model.layers.0.self_attn.k_proj.bias"]
    tensors["model.layers.1.mlp.gate_proj.bias"] = np.zeros(48, np.float32)
    tensors["model.norm.weight"] = np.zeros(31, np.float32)
    with pytest.raises(ValueError) as caught:
        config_and_weights(SafetensorsFolder(folder("qwen2", tensors)))
    message = str(caught.value)
    assert "missing: model.layers.*.self_attn.k_proj.bias;" in message
    assert "unknown: model.layers.*.mlp.gate_proj.bias;" in message
    assert "of another shape: model.norm.weight (31,) instead of (32,)" in message


def test_tied_head_that_is_stored_again_is_left_alone(folder):
    tensors = tensors_of("gemma2")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert_same_params(folder("gemma2", tensors), "gemma2")


def test_frequencies_of_old_files_are_left_alone(folder):
    tensors = tensors_of("llama")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors[name] = np.ones(4, np.float32)
    assert_same_params(folder("llama", tensors), "llama")

"""Tests of `load` from a file with everything in it: config, weights, tokenizer."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from conftest import TINY, tiny_params
from gguf_files import tensors_of, write

import m2r2_jax
from m2r2_jax.models import transformer
from m2r2_jax.ops.cpu import vector_registers
from m2r2_jax.ops.execution import EXACT, Execution

CONFIG = dataclasses.replace(TINY, width=64, num_layers=2)
LETTERS = [chr(code) for code in range(ord("!"), ord("~") + 1)]
TOKENS = [*LETTERS, "Ġ", "he", "<s>", "</s>"]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * (len(TOKENS) - 2) + [3, 3],
    "tokenizer.ggml.merges": ["h e"],
    "tokenizer.ggml.bos_token_id": len(TOKENS) - 2,
    "tokenizer.ggml.eos_token_id": len(TOKENS) - 1,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    tensors = tensors_of(CONFIG, tiny_params(CONFIG))
    folder = tmp_path_factory.mktemp("models")
    return write(folder / "smallest.gguf", CONFIG, tensors, metadata=TOKENIZER)


def test_load_reads_config_weights_and_tokenizer(path):
    model = m2r2_jax.load(path)
    assert model.config.name == "smallest"
    assert model.config.num_layers == CONFIG.num_layers
    assert model.unrolled and model.mesh is None
    assert model.execution == Execution("fused", vector_registers())
    assert model.exact.execution == EXACT
    assert model.params["embed"].dtype == jnp.float32
    assert model.tokenizer.encode("the") == [TOKENS.index("t"), TOKENS.index("he")]
    assert model.tokenizer.eos_ids == {TOKENS.index("</s>")}


def test_load_takes_storage_and_dtype(path):
    model = m2r2_jax.load(str(path), unrolled=False, dtype=jnp.bfloat16)
    assert not model.unrolled
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {
        jnp.dtype("bfloat16")
    }
    specs = transformer.weight_specs(CONFIG)["blocks"]
    assert model.params["blocks"].keys() == specs.keys()


@pytest.mark.parametrize("method", ["prompt_lookup", "m2r2"])
def test_generate_completes_plain_text_over_stacked_weights(path, method):
    """The storage that TPUs use, and a model without a chat template."""
    model = m2r2_jax.load(path, unrolled=False)
    settings = {"max_new_tokens": 12, "details": True}
    result = m2r2_jax.generate("he said", model, method=method, **settings)
    assert result.prompt_tokens == len("he said") - 1
    plain = m2r2_jax.generate("he said", model, method="autoregressive", **settings)
    assert result.token_ids == plain.token_ids
    assert result.text == plain.text


def test_load_keeps_the_users_compilation_cache(path, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        m2r2_jax.load(path)
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_float16_is_taken_with_a_warning(path):
    with pytest.warns(UserWarning, match="float16 holds numbers up to 65504"):
        model = m2r2_jax.load(path, dtype=jnp.float16)
    assert model.params["blocks"][0]["out"].dtype == jnp.float16


def test_ids_without_a_text_are_never_chosen(path):
    """The file's embedding has three times as many rows as there are tokens."""
    model = m2r2_jax.load(path)
    assert CONFIG.vocab_size > model.config.decodable == len(TOKENS)
    result = m2r2_jax.generate(
        "he said",
        model,
        max_new_tokens=40,
        min_new_tokens=40,
        temperature=5.0,
        details=True,
    )
    assert len(set(result.token_ids)) > 20
    assert max(result.token_ids) < len(TOKENS)


def test_folder_is_refused_with_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="tokenizers of folders are not read yet"):
        m2r2_jax.load(tmp_path)

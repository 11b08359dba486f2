"""Writes families/NAME: a random tiny model of each family, and what it computes.

Run it in an environment of its own, with a PyTorch for CPU:

    pip install torch==2.13.0 transformers==5.25.0 safetensors
    python make_families.py

Each folder is a checkpoint as transformers writes it, with every feature of the family
on, in bf16. `logits.safetensors` holds two rows of tokens and their logits in f32, and
where the rotary angles are scaled also `far_logits` of the same tokens `SPACING`
positions apart, and the `frequencies` themselves.
"""

import argparse
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

SPACING = 401
SHAPE = (2, 24)
COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16_384,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.5, 4.0, 9.0],
    "original_max_position_embeddings": 32,
}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
ALTERNATING = ["sliding_attention", "full_attention"]
# Folder -> (model_type, what differs from COMMON).
FAMILIES = {
    "llama": ("llama", {"rope_parameters": LLAMA3}),
    "llama_biased": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": ("mistral", {"sliding_window": 6, "head_dim": 16}),
    "qwen2": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "rope_parameters": YARN,
        },
    ),
    "qwen3": (
        "qwen3",
        {"head_dim": 16, "rope_parameters": {**YARN, "attention_factor": 1.0}},
    ),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 9,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", *ALTERNATING],
            "query_pre_attn_scalar": 9,
            "rope_parameters": GEMMA3_ROPES,
        },
    ),
    "phi3": (
        "phi3",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
        },
    ),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "granitemoe": (
        "granitemoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
    ),
}


def tiny_model(name: str, seed: int = 0):
    """A family's model: bf16 values computed in f32, norms and biases not as usual."""
    model_type, changes = FAMILIES[name]
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter_name, value in model.named_parameters():
        spread = 0.3 if "norm" in parameter_name or "bias" in parameter_name else 0.25
        with torch.no_grad():
            noise = torch.randn_like(value) * spread
            is_scale = "norm" in parameter_name and "gemma" not in model_type
            value.copy_((noise + is_scale).bfloat16().float())
    return model


def rope_frequencies(model) -> dict[str, torch.Tensor]:
    """Radians a position, with how far they stretch cosines and sines."""
    rope, found = model.model.rotary_emb, {}
    for buffer_name, value in rope.named_buffers():
        if buffer_name.endswith("inv_freq") and "original" not in buffer_name:
            found[f"frequencies.{buffer_name}"] = value.clone()
    return found


def results(model) -> dict[str, torch.Tensor]:
    """Tokens, and logits of whole rows."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, model.config.vocab_size, SHAPE, generator=generator)
    with torch.no_grad():
        found = {"tokens": tokens, "logits": model(tokens).logits}
        if has_scaling(model.config) and not has_window(model.config):
            far = (torch.arange(SHAPE[1]) * SPACING)[None].expand(SHAPE)
            found["far_logits"] = model(tokens, position_ids=far.contiguous()).logits
    return {name: value.clone() for name, value in found.items()}


def has_scaling(config) -> bool:
    return config.rope_parameters.get("rope_type", "default") != "default"


def has_window(config) -> bool:
    """Its mask counts rows, not positions: far positions would see too much."""
    return "sliding_attention" in (getattr(config, "layer_types", None) or ())


def write(model, folder: Path) -> None:
    """Config and weights in bf16, but not the rotary frequencies of the model."""
    state = {key: value.bfloat16() for key, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    model.save_pretrained(folder, state_dict=state)
    (folder / "generation_config.json").unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    here = Path(__file__).parent / "families"
    parser.add_argument("--folder", type=Path, default=here)
    parser.add_argument("names", nargs="*", default=[])
    args = parser.parse_args()
    for name in args.names or FAMILIES:
        model, folder = tiny_model(name), args.folder / name
        found = {**rope_frequencies(model), **results(model)}
        write(model, folder)
        save_file(found, folder / "logits.safetensors")
        print(name, f"{found['logits'].std():.2f}", sorted(found))


if __name__ == "__main__":
    main()

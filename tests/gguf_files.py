"""Writes tiny GGUF files, as llama.cpp's converter lays them out, and spoils them."""

import struct

import gguf
import numpy as np

F32 = gguf.GGMLQuantizationType.F32


def permuted(rows_OD: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's rotary order, as its converter writes q and k."""
    paired = rows_OD.reshape(heads, 2, len(rows_OD) // heads // 2, -1)
    return paired.swapaxes(1, 2).reshape(rows_OD.shape)


def tensors_of(config, params: dict) -> dict[str, np.ndarray]:
    """A file's tensors from stacked parameters."""
    K, G, D = config.num_kv_heads, config.queries_per_kv, config.width
    tensors = {
        "token_embd.weight": params["embed"],
        "output_norm.weight": params["final_norm"],
    }
    if not config.tied_head:
        tensors["output.weight"] = params["head"]
    for layer in range(config.num_layers):
        weights = {name: np.asarray(w[layer]) for name, w in params["blocks"].items()}
        query, key, value = (
            part.reshape(-1, D) for part in np.split(weights["qkv"], [G, G + 1], axis=1)
        )
        for name, tensor in {
            "attn_norm": weights["attention_norm"],
            "attn_q": permuted(query, K * G),
            "attn_k": permuted(key, K),
            "attn_v": value,
            "attn_output": weights["out"],
            "ffn_norm": weights["mlp_norm"],
            "ffn_gate": weights["gate_up"][0],
            "ffn_up": weights["gate_up"][1],
            "ffn_down": weights["down"],
        }.items():
            tensors[f"blk.{layer}.{name}.weight"] = tensor
    return {name: np.asarray(tensor) for name, tensor in tensors.items()}


def write(
    path, config, tensors, *, architecture="llama", kind=F32, metadata=None, big=False
):
    """Writes a GGUF file; matrices as `kind`, vectors in f32.

    A value of `metadata` that is None takes the key out; `big` is the byte order.
    """
    endian = gguf.GGUFEndian.BIG if big else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(path, architecture, endianess=endian)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.hidden_width)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    for name, value in (metadata or {}).items():
        kinds = {
            int: writer.add_uint32,
            str: writer.add_string,
            list: writer.add_array,
            float: writer.add_float32,
            bool: writer.add_bool,
        }
        if value is None:
            del writer.kv_data[0][name]
        else:
            kinds[type(value)](name, value)
    for name, tensor in tensors.items():
        stored = kind if tensor.ndim > 1 else F32
        writer.add_tensor(name, gguf.quantize(tensor, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def spoil_tensor(path, name: str, *, kind=None, offset=None) -> None:
    """Overwrites the type or the offset that a file's header gives a matrix."""
    content = bytearray(path.read_bytes())
    at = content.index(name.encode()) + len(name) + 4 + 2 * 8
    if kind is not None:
        struct.pack_into("<I", content, at, kind)
    if offset is not None:
        struct.pack_into("<Q", content, at + 4, offset)
    path.write_bytes(content)

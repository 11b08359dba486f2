"""Times our plain decoding against other systems' greedy decoding, interleaved.

Needs an environment with torch (CPU build), transformers and accelerate beside this
project's requirements, and llama-cpp-python for llama.cpp to take part. Same weights in
f32, same prompt, the same number of new tokens; llama.cpp gets one thread a core, torch
its default.

    python -m tests.golden.time_peers FILE.gguf
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from m2r2_jax import Model, Session, build_method, load

QUESTION = "Explain how a bicycle stays upright while it is moving."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    model = load(given.gguf)
    ids = model.tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    systems = {
        "ours": ours(model, ids, given.tokens),
        "transformers": transformers(given.gguf, ids, given.tokens),
    }
    try:
        systems["llama.cpp"] = llama_cpp(given.gguf, ids, given.tokens)
    except ImportError:
        print("llama.cpp is left out: pip install llama-cpp-python")
    answers = {name: run() for name, run in systems.items()}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(given.runs):
        for name, run in systems.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    own = statistics.median(seconds["ours"])
    for name, times in seconds.items():
        taken = statistics.median(times)
        same = answers[name] == answers["ours"]
        print(
            f"{name}: {given.tokens / taken:.1f} tokens/s, ours is {taken / own:.2f} "
            f"times as fast; identical ids: {same}"
        )


def ours(model: Model, ids: list[int], tokens: int) -> Callable[[], list[int]]:
    """A fresh session every time, so that the prompt is computed too."""

    def run() -> list[int]:
        session = Session(model, build_method("autoregressive", model))
        answers, _ = session.run([ids], tokens, eos_ids=frozenset())
        return answers[0].token_ids

    return run


def transformers(path: Path, ids: list[int], tokens: int) -> Callable[[], list[int]]:
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )

    def run() -> list[int]:
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=2,
        )
        return out[0, len(ids) :].tolist()

    return run


def llama_cpp(path: Path, ids: list[int], tokens: int) -> Callable[[], list[int]]:
    from llama_cpp import Llama

    with tempfile.TemporaryDirectory() as folder:
        wide = Path(folder) / "f32.gguf"
        widen(path, wide)
        model = Llama(
            str(wide),
            n_ctx=1024,
            n_threads=os.cpu_count(),
            use_mmap=False,
            verbose=False,
        )

    def run() -> list[int]:
        model.reset()
        found = []
        for id in model.generate(ids, temp=0.0, repeat_penalty=1.0):
            found.append(id)
            if len(found) == tokens:
                return found
        return found

    return run


def widen(path: Path, out: Path) -> None:
    """Writes a GGUF file again with every tensor in f32."""
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind, *inner = field.types
            value = field.contents()
            writer.add_key_value(name, value, kind, *inner[:1])
    for tensor in reader.tensors:
        data = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(data, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()

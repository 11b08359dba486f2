"""Times our plain decoding against transformers' greedy `generate`, interleaved.

Needs an environment with torch (CPU build) and transformers beside this project's
requirements. Same weights, same prompt, f32, the same number of new tokens, both with
their default threads unless OMP_NUM_THREADS says otherwise.

    python -m tests.golden.time_transformers FILE.gguf
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from m2r2_jax import Session, build_method, load

QUESTION = "Explain how a bicycle stays upright while it is moving."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    ours = load(given.gguf)
    theirs = AutoModelForCausalLM.from_pretrained(
        given.gguf.parent, gguf_file=given.gguf.name, dtype=torch.float32
    )
    ids = ours.tokenizer.encode_chat([{"role": "user", "content": QUESTION}])

    def run_ours() -> list[int]:
        session = Session(ours, build_method("autoregressive", ours))
        answers, _ = session.run([ids], given.tokens, eos_ids=frozenset())
        return answers[0].token_ids

    def run_theirs() -> list[int]:
        out = theirs.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            min_new_tokens=given.tokens,
            max_new_tokens=given.tokens,
            eos_token_id=None,
            pad_token_id=2,
        )
        return out[0, len(ids) :].tolist()

    same = run_ours() == run_theirs()
    seconds: dict[str, list[float]] = {"ours": [], "transformers": []}
    for _ in range(given.runs):
        for name, run in (("ours", run_ours), ("transformers", run_theirs)):
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"threads of torch: {torch.get_num_threads()}; identical ids: {same}")
    for name, median in medians.items():
        print(f"{name}: {given.tokens / median:.1f} tokens/s (median of {given.runs})")
    ratio = medians["transformers"] / medians["ours"]
    print(f"ours is {ratio:.2f} times as fast")


if __name__ == "__main__":
    main()

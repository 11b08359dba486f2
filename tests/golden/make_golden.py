"""Writes tokenizer.json and greedy.json, the references of the tests.

Run it in an environment of its own, with a PyTorch for CPU:

    pip install torch==2.13.0 transformers==5.24.0 gguf accelerate
    python make_golden.py SmolLM2-135M-Instruct.Q4_1.gguf

transformers (5.24 at least) ignores `tokenizer.ggml.pre`, so the pre-tokenizer of
SmolLM2 is put in its place here: each digit by itself, then GPT-2's rule.
"""

import argparse
import hashlib
import json
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import pre_tokenizers

STEPS = 128
TEXTS = [
    "The capital of France is Paris.",
    "  Leading, double  and trailing spaces \n\n\ttab\r\n",
    "def f(x):\n    return x[0] + 1  # café\n",
    "3333",
    "In 1969,  7 of 12.5% (²³ ½ Ⅷ ٣)",
    "I don't think they'll say it's WE'RE done.",
    "🤖👩‍🚀🏳️‍🌈",
    "汉字、かな、한국어",
    "naïve Ångström, e\u0301 and Привет, שלום, สวัสดี",
    "bytes without a token: \x04\x13\x1d|",
    "<|im_start|>user\nHi<|im_end|>",
    "<|im_end|><|im_start|><|endoftext|> <repo_name>x<|im_end",
    "",
]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CODING = [
    {
        "role": "user",
        "content": "Write a Python function that returns the n-th Fibonacci number.",
    }
]
SUMMARY = [
    {
        "role": "user",
        "content": (
            "Summarize the following text in two sentences.\n\n"
            "Lighthouses have guided ships along dangerous coasts for more than two "
            "thousand years. The earliest ones were simple fires lit on hilltops, and "
            "the most famous of them, the Pharos of Alexandria, stood over 100 meters "
            "tall. In the eighteenth century, oil lamps with polished mirrors replaced "
            "open flames, and in 1822 the French physicist Augustin Fresnel invented a "
            "lens that bent the light of a single lamp into a beam visible more than "
            "thirty kilometers away. Keepers lived beside the towers, trimmed the "
            "wicks, and wound the clockwork that turned the lens. Today nearly all "
            "lighthouses are automatic, and satellite navigation has made many of them "
            "unnecessary, yet towns preserve them as monuments to the sailors they "
            "once kept safe."
        ),
    }
]
DIALOGUE = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "Four"},
    {"role": "user", "content": "  And 3 + 39? "},
]


def load_tokenizer(gguf: Path):
    """Loads the tokenizer of the GGUF file with SmolLM2's own pre-tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name
    )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


def encode(tokenizer, text: str, special: bool) -> list[int]:
    """Encodes text with control tokens as units (special) or as ordinary text."""
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = not special
    return backend.encode(text, add_special_tokens=False).ids


def text_case(tokenizer, text: str) -> dict:
    """Returns a text with its ids, control tokens as ordinary text and as units."""
    ids, special_ids = (encode(tokenizer, text, special) for special in (False, True))
    return {"text": text, "ids": ids, "special_ids": special_ids}


def chat_case(tokenizer, messages: list[dict], generation: bool) -> dict:
    """Returns a conversation with its rendered text and ids."""
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=generation
    )
    return {
        "messages": messages,
        "add_generation_prompt": generation,
        "text": text,
        "ids": encode(tokenizer, text, special=True),
    }


@torch.inference_mode()
def greedy_case(model, tokenizer, messages: list[dict]) -> dict:
    """Decodes STEPS tokens greedily, past any end of turn.

    Returns:
        prompt_ids [prompt], greedy_ids and margins [STEPS] (the gap between the two
        largest logits), last_logits_head [16] (first logits after the prompt).
    """
    prompt_ids = chat_case(tokenizer, messages, generation=True)["ids"]
    output = model(torch.tensor([prompt_ids]), use_cache=True)
    head = output.logits[0, -1, :16].tolist()
    greedy_ids, margins = [], []
    while True:
        top = output.logits[0, -1].topk(2)
        greedy_ids.append(int(top.indices[0]))
        margins.append(round(float(top.values[0] - top.values[1]), 6))
        if len(greedy_ids) == STEPS:
            break
        output = model(
            top.indices[None, :1],
            past_key_values=output.past_key_values,
            use_cache=True,
        )
    return {
        "messages": messages,
        "prompt_ids": prompt_ids,
        "greedy_ids": greedy_ids,
        "margins": margins,
        "last_logits_head": [round(logit, 6) for logit in head],
    }


def write(path: Path, origin: dict, cases: dict[str, list[dict]]) -> None:
    """Writes JSON with one line for each case."""
    lines = [f'"{name}": {json.dumps(value)}' for name, value in origin.items()]
    for name, entries in cases.items():
        rows = ",\n".join(
            json.dumps(entry, ensure_ascii=False, separators=(",", ":"))
            for entry in entries
        )
        lines.append(f'"{name}": [\n{rows}\n]')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> None:
    """Writes both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("output", type=Path, nargs="?", default=Path(__file__).parent)
    arguments = parser.parse_args()
    gguf = arguments.gguf.resolve()
    torch.set_num_threads(1)  # one order of summation, and faster for so small a model
    modules = (torch, transformers, tokenizers)
    origin = {
        "model_sha256": hashlib.sha256(gguf.read_bytes()).hexdigest(),
        "versions": {module.__name__: module.__version__ for module in modules},
    }
    tokenizer = load_tokenizer(gguf)
    chats = [(QUESTION, True), (SUMMARY, True), (DIALOGUE, True), (DIALOGUE, False)]
    tokenizer_cases = {
        "texts": [text_case(tokenizer, text) for text in TEXTS],
        "chats": [chat_case(tokenizer, *chat) for chat in chats],
    }
    write(arguments.output / "tokenizer.json", origin, tokenizer_cases)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    conversations = (QUESTION, CODING, SUMMARY)
    greedy = [greedy_case(model, tokenizer, messages) for messages in conversations]
    write(arguments.output / "greedy.json", origin, {"cases": greedy})


if __name__ == "__main__":
    main()

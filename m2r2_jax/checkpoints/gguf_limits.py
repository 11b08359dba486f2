"""Limits of GGUF metadata: what makes a value one that is served here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

# A limit says what is wrong with a value, given the sound fields so far, or nothing.
# One that misses a field (KeyError) holds: the field's own problem is reported.
Limit = Callable[[Any, Mapping[str, Any]], "str | None"]


def between(low: float, high: float) -> Limit:
    words = f"must be from {low:,} to {high:,}"
    return lambda value, fields: None if low <= value <= high else words


def one_of(*allowed: object, but: str = "others are not supported") -> Limit:
    words = f"must be {' or '.join(str(value) for value in allowed)}; {but}"
    return lambda value, fields: None if value in allowed else words


def equal(field: str, what: str, but: str) -> Limit:
    def limit(value, fields):
        return (
            None if value == fields[field] else f"must be {what} {fields[field]}; {but}"
        )

    return limit


def have_tensors(value, fields):
    if value > fields["num_tensors"]:
        return f"must be at most {fields['num_tensors']}, the tensors of the file"


def even(value, fields):
    return "must be even; rotary embedding turns pairs" if value % 2 else None


def divides_heads(value, fields):
    if fields["num_heads"] % value:
        return f"must divide the {fields['num_heads']} query heads"


def no_window(value, fields):
    if 0 < value < fields["context_length"]:
        return (
            f"must be 0 or at least the context of {fields['context_length']}; sliding "
            "windows are not supported"
        )


def usual_scale(value, fields):
    usual = fields["head_dim"] ** -0.5
    if value and not math.isclose(value, usual, rel_tol=1e-5):
        return f"must be 0 or {usual:.6g}, one over the root of the head's width"


def no_scaling(value, fields):
    if value not in (0, 1) and fields["rope_scaling"] != "none":
        return (
            "must be 1, or the type of scaling none; rotary scaling (contexts longer "
            "than the model was trained for) is not supported"
        )


def valid_texts(value, fields):
    for index, text in enumerate(value):
        if isinstance(text, bytes):
            return (
                f"must be valid UTF-8 of at most 1 MiB, which entry {index}, "
                f"{text[:20]!r}, is not"
            )


def not_empty(value, fields):
    return None if value else "must not be empty"


def have_rows(value, fields):
    if len(value) > fields["vocab_size"]:
        return (
            f"must be at most {fields['vocab_size']:,} tokens, the rows of the "
            f"embedding, and is {len(value):,}"
        )


def one_per_token(value, fields):
    if len(value) != (needed := len(fields["tokens"])):
        return f"has {len(value):,} entries; the {needed:,} tokens need one each"
    if not 0 <= value.min() <= value.max() <= 6:
        return f"must be from 0 to 6; it goes from {value.min()} to {value.max()}"


def pairs_of_tokens(value, fields):
    known = set(fields["tokens"])
    for index, merge in enumerate(value):
        left, space, right = merge.partition(" ")
        if not space or not known.issuperset((left, right, left + right)):
            return (
                "must each be two tokens around a space that join to a token, which "
                f"entry {index}, {merge!r:.60}, is not"
            )


def is_token(value, fields):
    if not 0 <= value < len(fields["tokens"]):
        return (
            f"must be an id from 0 to {len(fields['tokens']) - 1:,}; take the key out "
            "where the model has no such token"
        )


def has_bos(value, fields):
    if value and fields["bos_id"] is None:
        return "needs tokenizer.ggml.bos_token_id, which is missing"

"""`--set key=value` read into an experiment's own options by their types."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeVar, get_type_hints

Options = TypeVar("Options")


def read_options(cls: type[Options], given: Mapping[str, str]) -> Options:
    """An options dataclass with the given values in place of its defaults.

    Fields are `int`, `float`, `bool`, `str` or `tuple[int, ...]` (written `2,4,8`).

    Raises:
      ValueError: an unknown key, or a value that is not of the field's type.
    """
    fields = {field.name: field.default for field in dataclasses.fields(cls)}
    if unknown := [key for key in given if key not in fields]:
        known = ", ".join(f"{name}={value}" for name, value in fields.items())
        raise ValueError(f"--set {unknown[0]}=...: known are, with defaults, {known}")
    types = get_type_hints(cls)
    return cls(**{key: _read(key, text, types[key]) for key, text in given.items()})


def _read(key: str, text: str, kind):
    try:
        if kind is bool:
            return {"true": True, "false": False}[text]
        if kind in (int, float, str):
            return kind(text)
        return tuple(int(part) for part in text.split(",") if part)
    except (KeyError, ValueError) as error:
        name = getattr(kind, "__name__", "list of int")
        raise ValueError(f"--set {key}={text}: {text!r} is not of {name}") from error

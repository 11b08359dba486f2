"""Folders in Hugging Face's form: `config.json` and safetensors, whole or in shards."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from m2r2_jax.checkpoints.families import family_of, model_config
from m2r2_jax.checkpoints.tensors import check, read_params, weights_of
from m2r2_jax.models.config import ModelConfig

_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
# What models with images wrap around the language model's names.
_WRAPPERS = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_OTHER_PARTS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
# Rotary frequencies, which old files hold although the config gives them.
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")


class SafetensorsFolder:
    """Tensors of a folder, memory-mapped and read one at a time.

    Attributes:
      path: of the folder.
      config: content of `config.json`.
    """

    def __init__(self, path: str | Path):
        """Opens the folder.

        Raises:
          FileNotFoundError: no folder, no config, no tensors, or a missing shard.
          ValueError: a file that is damaged, or does not belong to the others.
        """
        self.path = Path(path)
        self.config = _read_json(self.path / "config.json")
        self._files = {name: _open(self.path / name) for name in _files(self.path)}
        self._file_of: dict[str, str] = {}
        self._stored_as: dict[str, str] = {}
        for name, file in self._files.items():
            for stored in file.keys():
                self._add(stored, name)
        self._check_index()

    def _add(self, stored: str, file: str) -> None:
        if _OTHER_PARTS.match(stored) or _DERIVED.search(stored):
            return
        name = _unwrapped(stored)
        if name in self._file_of:
            raise ValueError(
                f"tensor {name!r} of {str(self.path)!r} is in both "
                f"{self._file_of[name]} and {file}; remove the file that does not "
                "belong there"
            )
        self._file_of[name], self._stored_as[name] = file, stored

    def _check_index(self) -> None:
        """Raises ValueError when the index and the files do not agree."""
        index = self.path / _INDEX
        if not index.is_file():
            return
        listed = _read_json(index)["weight_map"]
        absent = {
            f"{name} ({file})"
            for name, file in listed.items()
            if name not in self._files[file].keys()
        }
        if absent:
            raise ValueError(
                f"{str(index)!r} lists tensors that its files do not have: "
                f"{', '.join(sorted(absent)[:6])}; index and files are of different "
                "downloads"
            )

    def names(self) -> set[str]:
        """Names of the language model's tensors, without wrappers."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        file = self._files[self._file_of[name]]
        return tuple(file.get_slice(self._stored_as[name]).get_shape())

    def read(self, name: str) -> np.ndarray:
        """One tensor in its own dtype, bf16 included."""
        return self._files[self._file_of[name]].get_tensor(self._stored_as[name])


def config_and_weights(folder: SafetensorsFolder) -> tuple[ModelConfig, list]:
    """The config of a folder, and where each weight comes from, all checked.

    Raises:
      ValueError: a model that is not supported, or listing all tensors that do not
        fit at once.
    """
    there = folder.names()
    config = model_config(folder.path.resolve().name, folder.config, there)
    if config.tied_head:
        # Some writers store a tied head again; the embedding is what counts.
        there.discard("lm_head.weight")
    weights = weights_of(config, family_of(folder.config)[0].table, there)
    check(str(folder.path), config, weights, folder, there)
    return config, weights


def load_folder_params(
    folder: SafetensorsFolder,
    dtype,
    *,
    unrolled: bool,
    stream_dtype,
    place: Callable,
) -> tuple[ModelConfig, dict]:
    """Config and parameters of a folder; arguments as of `tensors.read_params`.

    Raises:
      ValueError: as `config_and_weights`.
    """
    config, weights = config_and_weights(folder)
    params = read_params(
        config,
        weights,
        folder,
        dtype,
        unrolled=unrolled,
        stream_dtype=stream_dtype,
        place=place,
    )
    return config, params


def _unwrapped(name: str) -> str:
    for wrapper, inner in _WRAPPERS.items():
        if name.startswith(wrapper):
            return inner + name.removeprefix(wrapper)
    return name


def _read_json(path: Path) -> dict:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder at {str(path.parent)!r}")
    if not path.is_file():
        raise FileNotFoundError(f"{str(path.parent)!r} has no {path.name}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON ({error})") from error


def _files(folder: Path) -> list[str]:
    """Files of tensors: those of the index, else `model*.safetensors`."""
    if (folder / _INDEX).is_file():
        needed = sorted(set(_read_json(folder / _INDEX)["weight_map"].values()))
    else:
        there = sorted(path.name for path in folder.glob("model*.safetensors"))
        needed = sorted({shard for name in there for shard in _all_shards(name)})
    if not needed:
        found = sorted(p.name for p in folder.iterdir() if p.suffix != ".json")
        raise FileNotFoundError(
            f"{str(folder)!r} has no model*.safetensors (it has {found[:6]}); only "
            "safetensors are read"
        )
    if missing := [name for name in needed if not (folder / name).is_file()]:
        raise FileNotFoundError(
            f"{str(folder)!r} lacks {', '.join(missing)}; an incomplete download?"
        )
    return needed


def _all_shards(name: str) -> list[str]:
    """Names of all shards that one of them tells of."""
    if (match := _SHARD.fullmatch(name)) is None:
        return [name]
    stem, number, count = match.groups()
    return [
        f"{stem}-{shard:0{len(number)}}-of-{count}.safetensors"
        for shard in range(1, int(count) + 1)
    ]


def _open(path: Path):
    # Imported here: reading parameters from elsewhere must not need the package.
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(
            f"{str(path)!r} is not a readable safetensors file ({error}); an "
            "incomplete download?"
        ) from error

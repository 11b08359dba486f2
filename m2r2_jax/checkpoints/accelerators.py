"""Trained accelerators as one small file: tensors, and what they need to be used."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from m2r2_jax.files import replacing
from m2r2_jax.models.config import ModelConfig
from m2r2_jax.models.multirate import MultiRateConfig, init_accelerators


@dataclasses.dataclass(frozen=True)
class DraftSettings:
    """How to draft with an accelerated stream, chosen on prompts of our own.

    Attributes:
      length: drafts a round at most.
      min_confidence: drafting stops below this probability.
    """

    length: int = 3
    min_confidence: float = 0.4


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedAccelerators:
    """What a training leaves behind.

    Attributes:
      model: name of the model they belong to.
      rates: exits and rank.
      params: the tree of `multirate.init_accelerators`, f32, stacked.
      head_ids: `int32[H]`, the ids of the draft head, commonest first; None for all.
      settings: how to draft with them.
      recipe: command, data, seed and figures of the training.
    """

    model: str
    rates: MultiRateConfig
    params: dict
    head_ids: np.ndarray | None
    settings: DraftSettings = DraftSettings()
    recipe: dict = dataclasses.field(default_factory=dict)


def save_accelerators(path: str | Path, trained: TrainedAccelerators) -> None:
    """Writes a safetensors file, atomically; weights are rounded to bf16."""
    from safetensors.numpy import save_file

    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(trained.params))
    tensors = {_name(key): np.asarray(leaf, ml_dtypes.bfloat16) for key, leaf in leaves}
    if trained.head_ids is not None:
        tensors["head_ids"] = np.asarray(trained.head_ids, np.int32)
    about = {
        "model": trained.model,
        "rates": json.dumps(dataclasses.asdict(trained.rates)),
        "settings": json.dumps(dataclasses.asdict(trained.settings)),
        "recipe": json.dumps(trained.recipe),
    }
    with replacing(Path(path)) as aside:
        save_file(tensors, aside, metadata=about)


def load_accelerators(path: str | Path, config: ModelConfig) -> TrainedAccelerators:
    """Reads accelerators and checks them against a model.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not a file of accelerators, or not this model's.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"no accelerators at {str(path)!r}")
    try:
        with safe_open(path, framework="numpy") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        rates = json.loads(about["rates"])
        head_ids = tensors.pop("head_ids", None)
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} is not a file of accelerators ({error!r})") from error
    rates["later_exits"] = tuple(rates["later_exits"])
    rates = MultiRateConfig(**rates)
    expected = jax.eval_shape(
        lambda key: init_accelerators(config, rates, key), jax.random.key(0)
    )
    keyed, structure = jax.tree_util.tree_flatten_with_path(expected)
    shapes = {_name(key): leaf.shape for key, leaf in keyed}
    if shapes != {name: tensor.shape for name, tensor in tensors.items()}:
        raise ValueError(
            f"the accelerators of {path} were trained for {about.get('model')} and do "
            f"not fit {config.name}; train some for it with --exp=train"
        )
    if head_ids is not None and not _inside(head_ids, config.vocab_size):
        raise ValueError(
            f"the draft head of {path} has ids from {head_ids.min()} to "
            f"{head_ids.max()}, the vocabulary of {config.name} {config.vocab_size}; "
            "train accelerators for this model with --exp=train"
        )
    leaves = [jnp.asarray(tensors[_name(key)], jnp.float32) for key, _ in keyed]
    return TrainedAccelerators(
        about["model"],
        rates,
        jax.tree.unflatten(structure, leaves),
        head_ids,
        DraftSettings(**json.loads(about["settings"])),
        json.loads(about["recipe"]),
    )


def shipped_accelerators(model: str) -> Path | None:
    """The file that this package ships for a model, if it does."""
    path = resources.files("m2r2_jax") / "artefacts" / f"{model}.safetensors"
    return Path(str(path)) if path.is_file() else None


def _inside(ids: np.ndarray, vocab_size: int) -> bool:
    return bool(np.all((ids >= 0) & (ids < vocab_size)))


def _name(path) -> str:
    return "/".join(str(key.key) for key in path)

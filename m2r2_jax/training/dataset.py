"""Self-written text as a TFDS dataset of array records, without TensorFlow."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds

from m2r2_jax.files import read_json_lines


class SelfWritten(tfds.core.GeneratorBasedBuilder):
    """Conversations that a model wrote, in the order of the files they lie in."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, *, source: str, **kwargs):
        """Creates the builder.

        Args:
          source: folder of .jsonl files, as `--exp=write` leaves them.
          **kwargs: those of `tfds.core.DatasetBuilder`.
        """
        self._source = Path(source)
        super().__init__(file_format="array_record", **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(
                {
                    "prompt": tfds.features.Text(),
                    "response": tfds.features.Text(),
                    "finished": np.bool_,
                    # Empty where encoding the text gives the ids back.
                    "prompt_ids": tfds.features.Sequence(np.int32),
                    "response_ids": tfds.features.Sequence(np.int32),
                }
            ),
            description=self.__doc__,
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager) -> dict:
        del dl_manager
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict]]:
        number = 0
        for path in sorted(self._source.glob("*.jsonl")):
            for row in read_json_lines(path):
                ids = {
                    name: row.get(name, []) for name in ("prompt_ids", "response_ids")
                }
                yield number, {**row, **ids}
                number += 1


def build(source: Path, folder: Path) -> Path:
    """Builds the dataset and returns where it lies, in a place of this text's own.

    Args:
      source: folder of .jsonl files.
      folder: the place is a folder below it named by the text's digest, so that
        text that has grown is never served from an older build.
    """
    digest = hashlib.sha256()
    for path in sorted(source.glob("*.jsonl")):
        digest.update(path.read_bytes())
    place = folder / digest.hexdigest()[:12]
    builder = SelfWritten(source=str(source), data_dir=str(place))
    builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(try_download_gcs=False)
    )
    return Path(builder.data_dir)


def read_rows(folder: Path) -> Iterator[dict]:
    """The conversations of a built dataset, in order, as rows of JSONL have them."""
    source = tfds.builder_from_directory(str(folder)).as_data_source(split="train")
    for example in source:
        row = {
            "prompt": example["prompt"].decode(),
            "response": example["response"].decode(),
            "finished": bool(example["finished"]),
        }
        for name in ("prompt_ids", "response_ids"):
            if len(example[name]):
                row[name] = [int(token) for token in example[name]]
        yield row

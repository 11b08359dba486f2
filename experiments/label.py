"""`--exp=label`: the teacher's final states and arg-max ids of a text, stored once."""

from __future__ import annotations

import dataclasses
from importlib import resources
from pathlib import Path

import numpy as np

from experiments.bars import progress_bar
from experiments.models import batch_identity, load_for_batches
from experiments.options import read_options
from experiments.suite import Settings
from m2r2_jax.training import packing
from m2r2_jax.training.exchanges import chat_frame
from m2r2_jax.training.labels import LabelStore, label_rows


@dataclasses.dataclass(frozen=True)
class LabelOptions:
    """Options of `--exp=label`.

    Attributes:
      row_length: tokens a packed row.
      batch: rows a pass.
    """

    row_length: int = 512
    batch: int = 2


def run(settings: Settings) -> dict:
    """Packs the conversations at `--data` and labels them into the output folder."""
    options = read_options(LabelOptions, settings.overrides)
    model = load_for_batches(settings)
    frame = chat_frame(model.tokenizer)
    sources = [settings.data] if settings.data else default_texts()
    conversations = [
        conversation
        for source in sources
        for conversation in packing.read_conversations(source, model.tokenizer, frame)
    ][: settings.limit]
    packed = packing.pack(conversations, frame, options.row_length, settings.seed)
    about = {
        **batch_identity(model),
        "conversations": len(conversations),
        "seed": settings.seed,
        "tokens": packing.fingerprint(packed),
    }
    store = LabelStore.create(settings.out, packed, model.config.width, about)
    ranking = packing.rank_tokens(conversations, model.config.vocab_size)
    np.save(settings.out / "ranking.npy", ranking)
    trained, filled = int(packed.trained.sum()), (packed.segment >= 0).mean()
    print(
        f"{', '.join(map(str, sources))}: {len(conversations)} conversations in "
        f"{len(packed)} rows of {packed.tokens.shape[1]} tokens: "
        f"{trained} to learn from, {filled:.1%} of the rows filled"
    )
    bar = progress_bar(len(packed), "row", store.rows_done)
    for done in label_rows(model, store, options.batch):
        bar.update(done - bar.n)
    bar.close()
    return {"experiment": "label", "tokens": trained, "rows": len(packed)}


def default_texts() -> list[Path]:
    """What `--exp=write` wrote here, else the texts that come with the project."""
    written = Path("results/write/shards")
    if written.is_dir():
        return [written]
    data = Path(str(resources.files("experiments") / "data"))
    return sorted(data.glob("*_written.jsonl.xz"))

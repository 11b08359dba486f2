"""`--exp=train`: accelerators for a frozen model, from labelled text.

A batch is a function of (seed, step), so a run that was killed goes on from its last
checkpoint and ends with bitwise the same accelerators.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from experiments.bars import progress_bar
from experiments.held_out import held_out_batches
from experiments.models import batch_identity, load_for_batches
from experiments.options import read_options
from experiments.suite import Settings
from experiments.train_log import Log, plot
from m2r2_jax import Model
from m2r2_jax.checkpoints.accelerators import (
    TrainedAccelerators,
    load_accelerators,
    save_accelerators,
)
from m2r2_jax.drafters.draft_head import draft_head
from m2r2_jax.files import write_text
from m2r2_jax.models.multirate import MultiRateConfig
from m2r2_jax.training import steps
from m2r2_jax.training.closed_form import closed_form_start
from m2r2_jax.training.labels import LabelStore, place_batch
from m2r2_jax.training.losses import Batch
from m2r2_jax.training.steps import TrainConfig, TrainState


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Options of `--exp=train`; see `MultiRateConfig` and `TrainConfig` too.

    Attributes:
      rate: instead of `exit_layer`: R = L / X.
      head: ids in the draft head, the commonest; 0 is the whole vocabulary.
      batch: packed rows a step.
      epochs: passes over the labelled rows.
      start: accelerators to go on from instead of the closed form.
      evaluate_every: steps between evaluations on held-out answers.
      checkpoint_every: steps between checkpoints.
    """

    exit_layer: int = 2
    later_exits: tuple[int, ...] = ()
    rate: int = 0
    rank: int = 64
    head: int = 8192
    batch: int = 4
    epochs: float = 1.0
    start: str = ""
    evaluate_every: int = 200
    checkpoint_every: int = 200
    learning_rate: float = TrainConfig.learning_rate
    warmup: int = TrainConfig.warmup
    draft_steps: int = TrainConfig.draft_steps
    draft_decay: float = TrainConfig.draft_decay
    overlap: float = TrainConfig.overlap
    alignment: float = TrainConfig.alignment


def run(settings: Settings) -> dict:
    """Trains, evaluates, writes accelerators, log and curve to the output folder."""
    options = read_options(TrainOptions, settings.overrides)
    store = LabelStore(settings.data or Path("results/label"))
    model = load_for_batches(settings)
    return Trainer(model, store, options, settings).run()


class Trainer:
    """One training run in one folder."""

    def __init__(
        self, model: Model, store: LabelStore, options: TrainOptions, settings: Settings
    ):
        self.model, self.store, self.options = model, store, options
        self.settings, self.out = settings, settings.out
        layers = model.config.num_layers
        exit_layer = options.exit_layer
        if options.rate:
            exit_layer = max(1, round(layers / options.rate))
        self.rates = MultiRateConfig(exit_layer, options.rank, options.later_exits)
        self.rates.validate(model.config)
        store.check_ids(model.config.vocab_size)
        rows = len(store.packed) if settings.limit is None else settings.limit
        if rows > store.rows_done:
            raise ValueError(
                f"{store.folder} has labels of {store.rows_done} rows out of "
                f"{len(store.packed)}; finish --exp=label, or pass a --limit"
            )
        self.rows = rows
        self.steps_per_epoch = max(1, self.rows // options.batch)
        named = {
            field.name: getattr(options, field.name)
            for field in dataclasses.fields(TrainConfig)
            if field.name != "steps"
        }
        steps = max(1, round(options.epochs * self.steps_per_epoch))
        self.train = TrainConfig(steps, **named)
        ranking = np.load(store.folder / "ranking.npy")
        self.head_ids = ranking[: options.head] if options.head else None
        self.head = draft_head(model.config, model.params, self.head_ids)
        self.held_out = held_out_batches(model, self.out.parent / "held_out")

    def run(self) -> dict:
        import orbax.checkpoint as ocp

        self.out.mkdir(parents=True, exist_ok=True)
        self._check_identity()
        keep = ocp.CheckpointManagerOptions(max_to_keep=2)
        with ocp.CheckpointManager(
            self.out.resolve() / "checkpoints", options=keep
        ) as manager:
            state = self._first_state()
            if (last := manager.latest_step()) is not None:
                state = manager.restore(last, args=ocp.args.StandardRestore(state))
            state = self._loop(state, manager)
        return self._finish(state)

    def _check_identity(self) -> None:
        """A folder belongs to one training: going on with another would mix them."""
        identity = {
            **batch_identity(self.model),
            "options": dataclasses.asdict(self.options),
            "seed": self.settings.seed,
            "labels": self.store.meta["about"],
            "rows": self.rows,
        }
        path, text = self.out / "train.json", json.dumps(identity, indent=1)
        if path.is_file() and json.loads(path.read_text()) != json.loads(text):
            raise ValueError(
                f"{self.out} holds another training (see {path}); choose another --out "
                "or remove it"
            )
        write_text(path, text)

    def _first_state(self) -> TrainState:
        """Accelerators to begin with, on every device of the mesh."""
        state = self._started()
        if self.model.mesh is None:
            return state
        everywhere = NamedSharding(self.model.mesh, PartitionSpec())
        return jax.device_put(state, everywhere)

    def _started(self) -> TrainState:
        config, key = self.model.config, jax.random.key(self.settings.seed)
        state = steps.init_state(config, self.rates, self.train, key)
        if self.options.start:
            found = load_accelerators(self.options.start, config)
            if found.rates != self.rates:
                raise ValueError(
                    f"{self.options.start} has exits and rank {found.rates}, asked for "
                    f"{self.rates}"
                )
            return state.replace(accelerators=found.params)
        first = (self.batch(step) for step in range(min(24, self.steps_per_epoch)))
        started = closed_form_start(
            config, self.rates, self.model.params, state.accelerators, first
        )
        return state.replace(accelerators=started)

    def batch(self, step: int) -> Batch:
        """The rows of a step: every epoch has an order of its own."""
        epoch, place = divmod(step, self.steps_per_epoch)
        rng = np.random.default_rng([self.settings.seed, epoch])
        size = self.options.batch
        order = rng.permutation(self.rows)[place * size : (place + 1) * size]
        return place_batch(self.model, self.store, np.sort(order))

    def _loop(self, state: TrainState, manager) -> TrainState:
        import orbax.checkpoint as ocp

        log = Log(self.out / "log.jsonl", int(state.step))
        total = self.train.steps
        bar = progress_bar(total, "step", int(state.step))
        started, tokens = time.perf_counter(), 0
        for step in range(int(state.step), total):
            batch = self.batch(step)
            state, metrics = steps.train_step(
                self.model.config,
                self.rates,
                self.train,
                self.model.params,
                self.head,
                state,
                batch,
            )
            metrics = {name: float(value) for name, value in metrics.items()}
            tokens += int(batch.trained.sum())
            rate = tokens / (time.perf_counter() - started)
            if not np.isfinite(metrics["loss"]):
                raise FloatingPointError(
                    f"the loss of step {step} is {metrics['loss']}; lower "
                    "learning_rate and start from the last checkpoint"
                )
            done = step + 1
            if done % self.options.evaluate_every == 0 or done == total:
                metrics |= self.evaluate(state)
                bar.write(
                    f"step {done}: loss {metrics['loss']:.3f}, {rate:.0f} tokens/s, "
                    f"simulated tau {metrics['tau']:.3f}, acceptance by position "
                    + " ".join(f"{a:.3f}" for a in metrics["acceptance"])
                )
            log.add({"step": done, "seconds": time.time(), **metrics})
            bar.update()
            bar.set_postfix(loss=f"{metrics['loss']:.2f}", tokens_per_s=int(rate))
            if done % self.options.checkpoint_every == 0 or done == total:
                manager.save(done, args=ocp.args.StandardSave(state))
                manager.wait_until_finished()
        bar.close()
        return state

    def evaluate(self, state: TrainState) -> dict:
        """Acceptance by position on held-out greedy answers, and tau from it."""
        counts = sum(
            np.asarray(
                steps.acceptance_counts(
                    self.model.config,
                    self.rates,
                    max(4, self.train.draft_steps),
                    self.model.params,
                    self.head,
                    state.accelerators,
                    batch,
                ),
                np.int64,
            )
            for batch in self.held_out
        )
        return summary(counts)

    def _finish(self, state: TrainState) -> dict:
        result = self.evaluate(state)
        recipe = {
            "command": self.settings.command,
            "labels": self.store.meta["about"],
            "seed": self.settings.seed,
            "options": dataclasses.asdict(self.options),
            "steps": int(state.step),
            "tokens": int(self.store.packed.trained[: self.rows].sum()),
            "held_out": result,
        }
        trained = TrainedAccelerators(
            self.model.config.name,
            self.rates,
            state.accelerators,
            self.head_ids,
            recipe=recipe,
        )
        save_accelerators(self.out / "accelerators.safetensors", trained)
        record = {"experiment": "train", **recipe}
        write_text(self.out / "results.json", json.dumps(record, indent=1))
        plot(self.out)
        print(
            f"simulated tau {result['tau']:.3f}; written to {self.out}/: "
            "accelerators.safetensors, log.jsonl, results.json"
        )
        return record


def summary(counts: np.ndarray) -> dict:
    """Conditional acceptance by position, and tokens a pass if all drafts are made."""
    reached, kept = counts[:-1], counts[1:]
    return {
        "acceptance": [
            float(k / max(r, 1)) for r, k in zip(reached, kept, strict=True)
        ],
        "tau": float(1 + np.sum(kept) / max(counts[0], 1)),
    }

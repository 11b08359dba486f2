"""Decodes over meshes and without one; prints what `test_mesh.py` compares, as JSON.

Run in its own process: the number of devices is fixed when JAX starts.
"""

import dataclasses
import json
import sys

import jax
from conftest import PLAIN, TINY, StubTokenizer, tiny_params, unrolled

from m2r2_jax.checkpoints.model import Model
from m2r2_jax.decoding.settings import SamplingParams
from m2r2_jax.drafters.methods import Method, build_method
from m2r2_jax.models import sharding
from m2r2_jax.models.transformer import weight_specs
from m2r2_jax.ops.execution import EXACT
from m2r2_jax.serving.engine import Engine
from m2r2_jax.serving.session import Session

PROMPTS = [[5, 17, 42, 3], [1, 1, 1], [*range(100, 117)], [9, 8, 7, 6, 9, 8, 7]]
SETTINGS = {
    "prompt_lookup": {"max_ngram": 3, "min_ngram": 2},
    "early_exit": {"exit_layer": 1, "length": 4, "min_confidence": 0.3},
}


def on_mesh(model: Model, mesh) -> Model:
    """The same model with its weights placed by the rules."""
    specs = weight_specs(model.config)

    def place(spec, weight):
        where = sharding.sharding(mesh, spec.axes, weight.shape)
        return jax.device_put(weight, where)

    ends = {name: specs[name] for name in specs if name != "blocks"}
    params = jax.tree.map(place, ends, {name: model.params[name] for name in ends})
    params["blocks"] = tuple(
        jax.tree.map(place, specs["blocks"], weights)
        for weights in model.params["blocks"]
    )
    return dataclasses.replace(model, params=params, mesh=mesh)


def method_of(name: str, model: Model) -> Method:
    if name == "plain":
        return PLAIN
    return build_method(name, model, **SETTINGS[name])


class Watched(Engine):
    """An engine that notes where the last state of its loop lies."""

    def collect(self, state, *arguments):
        self.spread = {"keys": spread(state.cache.keys[0])}
        self.spread["history"] = spread(state.history)
        self.spread["length"] = spread(state.cache.length)
        return super().collect(state, *arguments)


def spread(array: jax.Array) -> list:
    """Shapes of the pieces, by device."""
    pieces = array.addressable_shards
    return [
        list(piece.data.shape) for piece in sorted(pieces, key=lambda p: p.device.id)
    ]


def turns(model: Model, name: str, batch: int, temperature: float) -> dict:
    """Ids of two turns, the second of which reuses the first one's cache."""
    session = Session(model, method_of(name, model), batch=batch)
    session.engine = Watched(session.model, session.method, batch)
    prompts, ids = PROMPTS[:batch], []
    for _ in range(2):
        how = SamplingParams(temperature=temperature, seed=3)
        answers, _ = session.run(prompts, 24, sampling=how)
        ids.append([answer.token_ids for answer in answers])
        prompts = [[*p, *new, 11, 12] for p, new in zip(prompts, ids[-1], strict=True)]
    return {"ids": ids, "spread": session.engine.spread}


def refusal(model: Model, batch: int) -> str:
    try:
        Session(model, PLAIN, batch=batch)
    except ValueError as error:
        return str(error)
    return ""


def main(*cases: str) -> None:
    """Cases are MESH METHOD BATCH TEMPERATURE; plain decoding without a mesh beside."""
    # Partitioning makes programs slow to compile: as few layers as M2R2 needs.
    config = dataclasses.replace(TINY, num_layers=2)
    params = unrolled(tiny_params(config))
    model = Model(config, params, StubTokenizer(), execution=EXACT)
    results, plain = {}, {}
    for case in cases:
        mesh, name, batch, temperature = case.split(" ")
        sharded = on_mesh(model, sharding.make_mesh(mesh))
        results[case] = turns(sharded, name, int(batch), float(temperature))
        results[case]["qkv"] = spread(sharded.params["blocks"][0]["qkv"])
        results[case]["refusal"] = refusal(sharded, 3)
        if temperature not in plain:
            plain[temperature] = turns(model, "plain", 4, float(temperature))
    print(json.dumps({"cases": results, "plain": plain}))


if __name__ == "__main__":
    main(*sys.argv[1:])

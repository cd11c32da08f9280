"""python scripts/nsa_steps.py --batch 8 --position 256 --rounds 3 sparse-fsdp-8 sparse-1 dense-fsdp-8 dense-1

Times training steps of the bundled model of 125M parameters, with sparse and with dense attention, as JSON on stdout.
The programs take turns in one process, so that other work on the machine slows all of them alike. Devices are virtual:
threads of one process on the same cores, so that processor seconds say what a step costs, whoever else uses the cores.
"""

import argparse
import json
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shardplan import config as configuration
from shardplan.execution import specialize, step_program
from shardplan.model.bundled_configs import BUNDLED
from shardplan.model.model_class import DECODER
from shardplan.plan.attention_plan import AttentionPlan, Strategy
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import model_from_config
from shardplan.steps.kinds import step_of

DEVICES = 8
TOKENS = 256
"""Tokens that texts have; the loss can fall because these are few of the vocabulary."""
HOST_WORDS = ("callback", "infeed", "outfeed", "SendToHost", "RecvFromHost")
"""Parts of the names of operations by which a compiled program waits for the host."""


@dataclass
class TimedStep:
    """A compiled step, its state, and the seconds of its runs."""

    program: Any
    arguments: tuple[Any, ...]
    host_operations: int
    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Compute a step, and keep the updated parameters."""
        started, before = time.perf_counter(), time.process_time()
        module, state, loss = self.program(*eqx.filter(self.arguments, eqx.is_array))
        jax.block_until_ready((module, state, loss))
        self.wall.append(time.perf_counter() - started)
        self.processor.append(time.process_time() - before)
        self.losses.append(float(loss))
        self.arguments = (module, state, *self.arguments[2:])


def config_values(attention: str) -> dict[str, Any]:
    """The config.json of the bundled model, or of the same model with attention to all tokens."""
    values: dict[str, Any] = json.loads(BUNDLED["nsa-125m"].read_text())
    if attention == "sparse":
        return values
    others = {name: value for name, value in values.items() if name not in ("native_sparse_attention", "architectures")}
    return {**others, "model_type": "llama"}


def plan_step(name: str, batch: int, position: int) -> tuple[Any, Any]:
    """The model and the plan of a program: `sparse-fsdp-8`, `sparse-positions-4` or `dense-1`, for example."""
    attention, *sharded, count = name.split("-")
    devices, is_over_positions = int(count), sharded == ["positions"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config_values(attention)))
        config = configuration.load_config(
            model={"config": str(path), "levanter_class": DECODER},
            hardware={"slice": f"cpu-{devices}"},
            workload={"kind": "train", "batch": batch, "position": position, "param_dtype": "float32",
                      "compute_dtype": "float32"},
        )  # fmt: skip
        model = model_from_config(config)
    method = AttentionPlan(Strategy.ALL_GATHER, 1, devices, "contiguous") if is_over_positions else None
    compute = {"position" if is_over_positions else "batch": ["data"]}
    sizes = {"replica": 1, "data": devices, "model": 1}
    return model, plan_given_mappings(config, model, sizes, compute, {"embed": ["data"]}, method)


def prepare_step(name: str, batch: int, position: int) -> TimedStep:
    """Compile a program, and place its arguments on the devices."""
    model, plan = plan_step(name, batch, position)
    model = specialize(model, plan)
    mesh = Mesh(np.array(jax.devices()[: plan.mesh["data"]]).reshape(tuple(plan.mesh.values())), tuple(plan.mesh))
    program = step_program(model, plan, mesh)
    tokens = np.random.default_rng(0).integers(0, TOKENS, (batch, position))
    inputs = hax.named(jnp.asarray(tokens, jnp.int32), ("batch", "position"))
    module = model.config.build(model.vocab, key=jax.random.PRNGKey(0))
    (state,) = step_of(plan.workload).state(plan.workload.resolve(), eqx.filter(module, eqx.is_array))
    state = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, state
    )
    given = jax.tree.leaves(eqx.filter((module, state, inputs, hax.ones_like(inputs).astype(bool)), eqx.is_array))
    like, static = eqx.partition(program.arguments, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    placed = []
    for array, each in zip(given, jax.tree.leaves(like), strict=True):
        placed.append(jnp.copy(jax.device_put(array, each.sharding)))  # a step donates its arguments
    arguments = eqx.combine(jax.tree.unflatten(jax.tree.structure(like), placed), static)
    compiled = program.lower().compile()
    text = compiled.as_text()
    return TimedStep(compiled, arguments, sum(text.count(word) for word in HOST_WORDS))


def main() -> None:
    """Compare steps, and print their seconds and losses; seconds of the first round are left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="+")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--position", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    steps = {name: prepare_step(name, given.batch, given.position) for name in given.programs}
    for _ in range(given.rounds + 1):
        for step in steps.values():
            step.run()
    results = {}
    for name, step in steps.items():
        results[name] = {
            "wall": step.wall[1:], "processor": step.processor[1:], "losses": step.losses,
            "host_operations": step.host_operations,
        }  # fmt: skip
    print(json.dumps({"batch": given.batch, "position": given.position, "programs": results}))


if __name__ == "__main__":
    main()

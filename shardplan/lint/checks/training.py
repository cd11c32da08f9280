"""Counts the memory of adapters, DPO pairs, reference models and averages, and lists sections it cannot count.

With adapters (LoRA), frozen parameters are stored in the compute type and have neither gradients nor optimizer state;
the adapters themselves have all three. DPO computes two sequences of every example, and keeps a second model in the
compute type. A moving average is one more copy of what is trained: a state of the optimizer.
"""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import equinox as eqx
import jax

from shardplan.config import PlanConfig
from shardplan.cost.buffer_roles import MemoryPart
from shardplan.cost.calibration import compiler_quirks
from shardplan.cost.memory import memory_by_part
from shardplan.cost.sharding import ShardingAssignment
from shardplan.hardware import Slice
from shardplan.levanter_config.training_extras import LARGER_STATE, OPTIMIZERS, TrainingExtras
from shardplan.lint.findings import Finding, FindingKind, Severity
from shardplan.model.inspect import axes_of, named_leaves
from shardplan.model.registry import Model
from shardplan.plan.file.sections import MemoryPlan
from shardplan.plan.mapping import as_tuples, mesh_size
from shardplan.plan.plan import Plan
from shardplan.plan.workload.dtypes import itemsize
from shardplan.plan.workload.workload import Workload
from shardplan.program.step_trace import plan_step
from shardplan.search.given_plan import plan_given_mappings
from shardplan.steps.optimizer import EMA_SUFFIX

ADAPTER_COPIES = 4
"""Number of copies of an adapter in memory: its parameters, their gradients, and Adam's two moments."""
SEQUENCES_OF_A_PAIR = 2
"""Number of sequences in an example of DPO: the chosen and the rejected one."""


def with_optimizer(workload: Workload, extras: TrainingExtras, is_given: bool) -> Workload:
    """Return `workload` with the optimizer of the file, and with averaged parameters if the file asks for them.

    Args:
        is_given: whether the user names the optimizer, which then replaces the file's.
    """
    if not workload.is_training:
        return workload
    name = workload.optimizer if is_given else OPTIMIZERS.get(extras.optimizer, "adamw")
    averages = extras.averages and extras.adapter_key is None and not name.endswith(EMA_SUFFIX)
    return replace(workload, optimizer=name + EMA_SUFFIX if averages else name)


def count_extras(plan: Plan, config: PlanConfig, model: Model, hardware: Slice, extras: TrainingExtras) -> Plan:
    """Return `plan`, made for training all parameters, with the memory that `extras` add or save."""
    if not extras.is_other_step:
        return plan
    counted = plan
    if extras.is_preference:
        pairs = replace(config.workload, batch=SEQUENCES_OF_A_PAIR * config.workload.batch)
        counted = plan_given_mappings(
            replace(config, workload=pairs), model, plan.mesh, plan.compute_mapping, plan.param_mapping
        )
    memory = counted.memory
    width = itemsize(plan.workload.compute_dtype) / itemsize(plan.workload.param_dtype)
    if extras.adapter_key is not None:
        memory = _adapter_memory(counted, model, hardware, width, adapter_bytes(plan, model, extras))
    if extras.has_reference:
        copy = round(plan.memory.parameters * width)
        memory = replace(memory, parameters=memory.parameters + copy, peak=memory.peak + copy)
    return replace(plan, memory=memory)


def _adapter_memory(plan: Plan, model: Model, hardware: Slice, width: float, adapters: int) -> MemoryPlan:
    """Return the memory of training only adapters under the mappings of `plan`.

    Args:
        adapters: bytes per device of the adapters' parameters.
        width: bytes of the compute type per byte of the parameter type.
    """
    step = plan_step(model, plan.workload.resolve())
    assignment = ShardingAssignment(
        plan.mesh, as_tuples(plan.compute_mapping), as_tuples(plan.param_mapping), step.merged_axes,
        step.activation_axes, compiler_quirks(hardware), plan.attention,
    )  # fmt: skip
    dropped = (MemoryPart.OPTIMIZER, MemoryPart.GRADIENTS, MemoryPart.CAST_PARAMETERS)
    points = []
    for parts in memory_by_part(step, assignment):
        kept = {part: amount for part, amount in parts.items() if part not in dropped}
        kept[MemoryPart.PARAMETERS] = kept[MemoryPart.PARAMETERS] * width + adapters
        kept[MemoryPart.GRADIENTS] = adapters
        kept[MemoryPart.OPTIMIZER] = (ADAPTER_COPIES - 2) * adapters
        points.append(kept)
    largest = max(points, key=lambda parts: sum(parts.values()))
    sizes: dict[str, int] = {part.value: round(largest.get(part, 0.0)) for part in MemoryPart}
    return replace(plan.memory, **sizes, peak=sum(sizes.values()))


def adapter_bytes(plan: Plan, model: Model, extras: TrainingExtras) -> int:
    """Return the bytes per device of the file's adapter parameters, which Levanter itself adds to the model."""
    lora = import_module("levanter.adaptor.lora")
    values = dict(extras.lora or {})
    names = {field for field in lora.LoraConfig.__dataclass_fields__}
    settings = lora.LoraConfig(**{key: value for key, value in values.items() if key in names})
    key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    adapted = eqx.filter_eval_shape(lambda module, key: lora.loraize(module, settings, key), model.template, key)
    base = {path for path, _ in named_leaves(model.template)}
    total = 0
    for path, leaf in named_leaves(adapted):
        if path not in base and ".lora." in f".{path}.":
            total += _bytes_per_device(leaf, plan)
    return total


def _bytes_per_device(leaf: Any, plan: Plan) -> int:
    shards = 1
    size = 1
    for axis in axes_of(leaf):
        shards *= mesh_size(plan.mesh, plan.param_mapping.get(axis.name, ()))
        size *= axis.size
    return size * itemsize(plan.workload.param_dtype) // shards


def check_extras(extras: TrainingExtras, workload: Workload, is_optimizer_given: bool) -> Iterator[Finding]:
    """List the sections that the prediction ignores, and whether this makes it too high or too low."""
    if workload.kind_row.makes_tokens:
        yield _not_counted(
            "engine", "the prediction is of the prompts alone: cached keys and values, and the tokens that are "
            "generated, are not counted; memory and time are too low",
        )  # fmt: skip
    if not workload.is_training:
        return
    if extras.optimizer not in OPTIMIZERS and not is_optimizer_given:
        direction = "too low" if extras.optimizer in LARGER_STATE else "too high"
        yield _not_counted(
            "optimizer.type", f"the state of the optimizer {extras.optimizer!r} is not counted: memory is predicted "
            f"with that of adamw, which is {direction}",
        )  # fmt: skip
    if extras.adapter_key is not None and extras.adapter_type != "lora":
        yield _not_counted(
            extras.adapter_key, f"adapters of type {extras.adapter_type!r} are counted as those of type 'lora'"
        )
    if extras.adapter_key is not None:
        yield _not_counted(
            extras.adapter_key, "memory is that of training the adapters alone; the time of a step is not: it is "
            "predicted for the gradients of all parameters, which is too high",
        )  # fmt: skip
    if extras.is_preference:
        also = " and the reference model" if extras.has_reference else ""
        yield _not_counted(
            "reference" if extras.has_reference else "beta", f"memory has both sequences of every example{also}; the "
            "time of a step has one sequence of each and no reference, which is too low",
        )  # fmt: skip
    if extras.quantization:
        yield _not_counted(
            "trainer.quantization", "quantized matrix products are not counted: the time of a step is predicted in the "
            "compute type, which is too high",
        )  # fmt: skip


def _not_counted(key: str, text: str) -> Finding:
    return Finding(
        Severity.WARNING, FindingKind.NOT_COUNTED, (key,), text, "ask the compiler (shardplan verify), or measure it"
    )

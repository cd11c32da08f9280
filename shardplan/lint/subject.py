"""The subject of a lint: a trainer section together with the model, workload and slice that it is for."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardplan.hardware import Slice
from shardplan.levanter_config.section import MappingEntry
from shardplan.levanter_config.trainer_section import TrainerSection
from shardplan.lint.findings import short
from shardplan.model.axes import ModelAxes, Parameter
from shardplan.plan.mapping import as_tuples
from shardplan.plan.serialization import flatten
from shardplan.plan.workload.dtypes import itemsize
from shardplan.plan.workload.workload import BATCH_AXIS, Workload
from shardplan.program.tasks import Step


@dataclass(frozen=True)
class Subject:
    """A trainer section, and the model, workload and slice that it is linted for."""

    trainer: Mapping[str, Any]
    """Content of the `trainer` section, corrected."""
    section: TrainerSection
    """The corrected `trainer` section, parsed."""
    axes: ModelAxes
    workload: Workload
    hardware: Slice
    step: Step
    """The traced step."""
    attention_backend: str | None
    """`model.attn_backend`, corrected; None for Levanter's default."""
    activation_only: frozenset[str] = frozenset()
    """Logical axes in the compute mapping that activations have, but neither parameters nor the tokens have."""

    @cached_property
    def compute(self) -> dict[str, tuple[str, ...]]:
        """The compute mapping."""
        return as_tuples(self.section.compute_mapping)

    @cached_property
    def params(self) -> dict[str, tuple[str, ...]]:
        """The parameter mapping."""
        return as_tuples(self.section.param_mapping)

    @cached_property
    def known(self) -> set[str]:
        """Logical axes of the parameters and the tokens."""
        return {*self.axes.axes, self.axes.position, *self.batch_axes}

    @property
    def batch_axes(self) -> set[str]:
        """The two names of the batch axis: the name in the model's code, and the name in the trainer section."""
        return {BATCH_AXIS, self.section.batch_axis}

    @cached_property
    def weight_axes(self) -> list[str]:
        """Logical axes of weights in matrix products, except the axes along which experts are stacked."""
        used = dict.fromkeys(name for weight in self.step.used_weights for name in weight.logical_axes)
        return [name for name in used if name not in self.step.expert_axes]

    @cached_property
    def stacked(self) -> set[str]:
        """Logical axes of parameters along which layers are stacked."""
        return {*self.axes.axes} & self.step.stacked_axes

    @cached_property
    def mappable(self) -> set[str]:
        """Logical axes that a plan may shard."""
        return self.known - self.stacked

    @cached_property
    def linear_results(self) -> dict[tuple[str, ...], str]:
        """Logical axes of linear layers' results, which Haliax shards -> description of the result."""
        results: dict[tuple[str, ...], str] = {}
        # inputs are left out: Haliax does not constrain their sharding, and such layers run (docs/log.md)
        paths = [parameter.path for parameter in self.axes.parameters]
        for task, weight in sorted(self.step.weight_matmuls, key=lambda product: paths.index(product[1].weight or "")):
            axes = tuple(
                self.section.batch_axis if name == BATCH_AXIS else name for name in task.results[0].logical_axes
            )
            if task.groups == 1 and self.axes.position in axes:  # routed tokens have axes of their own
                results.setdefault(axes, f"the result of {short(weight.weight or '')}")
        return results

    def size(self, axis: str) -> int:
        """Return the number of elements along a logical axis, one of `known`."""
        if axis == self.axes.position:
            return self.workload.position
        return self.workload.batch if axis in self.batch_axes else self.axes.axes[axis]

    @property
    def rounding_mapping(self) -> dict[str, tuple[str, ...]]:
        """The mapping by which Levanter rounds the vocabulary up: `params` in train_lm, `compute` in eval_lm."""
        return self.params if self.workload.is_training else self.compute

    @property
    def rounded_vocab(self) -> int:
        """Size of the vocabulary after Levanter has rounded it up to a multiple of its shards."""
        size, devices = self.axes.axes[self.axes.vocab], self.devices(self.rounding_mapping.get(self.axes.vocab, ()))
        return -(-size // devices) * devices

    def devices(self, mesh_axes: Iterable[str]) -> int:
        """Return the number of devices along all of `mesh_axes`."""
        return math.prod(self.section.mesh[axis] for axis in mesh_axes)

    def shards(self, parameter: Parameter) -> int:
        """Return the number of shards of the stored parameter."""
        return math.prod(self.devices(self.params.get(axis, ())) for axis in parameter.axes)

    def bytes(self, parameters: Iterable[Parameter]) -> dict[str, int]:
        """Return path -> stored bytes per device, largest first."""
        width = itemsize(self.workload.param_dtype)
        sizes = {p.path: p.size * width // self.shards(p) for p in parameters}
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes per device of all stored parameters; a mesh axis on two dimensions of a parameter counts once."""
        width = itemsize(self.workload.param_dtype)
        total = 0
        for parameter in self.axes.parameters:
            mesh_axes = set[str]()
            for axis in parameter.axes:
                mesh_axes.update(self.params.get(axis, ()))
            total += parameter.size * width // self.devices(mesh_axes)
        return total

    def not_sharded_over(self, parameters: Iterable[Parameter], mesh_axes: Iterable[str]) -> list[Parameter]:
        """Return the `parameters` that no axis of `mesh_axes` shards in storage."""
        excluded = set(mesh_axes)
        return [p for p in parameters if not any(excluded & set(self.params.get(axis, ())) for axis in p.axes)]

    def replicated(self, parameters: dict[str, int]) -> dict[str, int]:
        """Return those of the given `parameters` (path -> bytes per device) that several devices store replicated."""
        shards = {p.path: self.shards(p) for p in self.axes.parameters}
        return {path: amount for path, amount in parameters.items() if shards[path] == 1 and self.hardware.devices > 1}

    @cached_property
    def _entries(self) -> tuple[MappingEntry, ...]:
        return (*self.section.compute_entries, *self.section.param_entries)

    def keys(self, axes: Iterable[str], mesh_axis: str | None = None) -> tuple[str, ...]:
        """Return the keys that map any of the logical axes `axes`; with `mesh_axis`, only keys that map to it."""
        selected = set(axes)
        entries = (e for e in self._entries if e.axis in selected and mesh_axis in (None, *e.mesh_axes))
        return tuple(dict.fromkeys(entry.key for entry in entries))

    @cached_property
    def default_keys(self) -> set[str]:
        """Return the keys that map logical axes by Levanter's default, because the section omits them."""
        return {entry.key for entry in self._entries} - flatten(self.trainer, "trainer.").keys()

    def size_key(self, mesh_axis: str) -> str:
        """Return the key for the size of a mesh axis."""
        return f"trainer.mesh.axes.{mesh_axis}"

    mapping_keys = ("trainer.mesh.shared_mapping", "trainer.mesh.param_mapping")
    """Keys of the mapping for both shardings, and of the mapping for parameter sharding alone."""

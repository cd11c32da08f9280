"""A finding: one thing that a hand-written layout gets wrong, and what findings are made from."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shardplan.config import WorkloadConfig
from shardplan.hardware import GIB, Slice
from shardplan.levanter_config.trainer_section import LevanterLayout
from shardplan.model import ModelAxes, Parameter
from shardplan.plan.mapping import as_tuples, mesh_text
from shardplan.plan.plan import BATCH_AXIS
from shardplan.plan.workload import itemsize
from shardplan.program.tasks import Step

ERROR, WARNING = "error", "warning"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    severity: str
    """error: it fails, is wrong in silence, or holds whole on every device what was to be cut; warning: wasteful, or
    without effect."""
    kind: str
    where: tuple[str, ...]
    """Dotted keys of the configuration."""
    text: str
    """What is wrong there, and why."""
    remedy: str
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Path -> bytes per device, of the parameters it is about."""
    axes: frozenset[str] = frozenset()
    """Logical and mesh axes of which an entry or a size has to change; none where any change may help."""

    def to_json(self) -> dict[str, Any]:
        """Everything but `axes`, as JSON values."""
        return {
            "severity": self.severity,
            "kind": self.kind,
            "where": list(self.where),
            "text": self.text,
            "remedy": self.remedy,
            "parameters": dict(self.parameters),
        }


@dataclass(frozen=True)
class Subject:
    """A layout, and the model, workload and slice that it is for."""

    trainer: Mapping[str, Any]
    layout: LevanterLayout
    axes: ModelAxes
    workload: WorkloadConfig
    hardware: Slice
    step: Step
    """The traced step."""
    attention_backend: str | None
    """As `model.attn_backend` names it; None for Levanter's default."""
    running: frozenset[str] = frozenset()
    """Logical axes mapped while computing that arrays have only while the model runs."""

    @property
    def is_flat(self) -> bool:
        """Whether the configuration is of the flat schema rather than that with a `mesh` section."""
        return "mesh" not in self.trainer

    @cached_property
    def compute(self) -> dict[str, tuple[str, ...]]:
        """Mapping while computing."""
        return as_tuples(self.layout.compute_mapping)

    @cached_property
    def params(self) -> dict[str, tuple[str, ...]]:
        """Mapping of parameters at rest."""
        return as_tuples(self.layout.param_mapping)

    @cached_property
    def known(self) -> set[str]:
        """Logical axes that the model's arrays have."""
        return {*self.axes.axes, self.axes.position, *self.batch_axes}

    @property
    def batch_axes(self) -> set[str]:
        """What the axis of the sequences is called: by the model's code, and by the trainer."""
        return {BATCH_AXIS, self.layout.batch_axis}

    @cached_property
    def computed(self) -> list[str]:
        """Logical axes of products with weights; those that layers are stacked along, and experts, are none."""
        used = dict.fromkeys(name for _, weight in self.step.products for name in weight.axes)
        return [name for name in used if name not in self.step.routed]

    @cached_property
    def stacked(self) -> set[str]:
        """Logical axes that layers are stacked along: those of parameters that no product has, but for the residual."""
        return {*self.axes.axes} - self.step.multiplied - {self.axes.residual, self.axes.position}

    @cached_property
    def mappable(self) -> set[str]:
        """Logical axes that a plan may cut."""
        return self.known - self.stacked

    @cached_property
    def activations(self) -> dict[tuple[str, ...], str]:
        """Axes of the activations that Haliax shards, the results of linear layers -> what they are."""
        found: dict[tuple[str, ...], str] = {}
        paths = [parameter.path for parameter in self.axes.parameters]
        for task, weight in sorted(self.step.products, key=lambda product: paths.index(product[1].weight or "")):
            axes = tuple(self.layout.batch_axis if name == BATCH_AXIS else name for name in task.results[0].axes)
            if task.groups == 1 and self.axes.position in axes:  # routed tokens have axes of their own
                found.setdefault(axes, f"the result of {short(weight.weight or '')}")
        return found

    def size(self, axis: str) -> int:
        """Number of elements along a logical axis that is known."""
        if axis == self.axes.position:
            return self.workload.position
        return self.workload.batch if axis in self.batch_axes else self.axes.axes[axis]

    @property
    def rounding(self) -> dict[str, tuple[str, ...]]:
        """The mapping by which Levanter's main rounds the vocabulary: train_lm's is another than eval_lm's."""
        return self.params if self.workload.kind == "train" else self.compute

    @property
    def rounded_vocab(self) -> int:
        """Size that Levanter gives the vocabulary."""
        size, devices = self.axes.axes[self.axes.vocab], self.devices(self.rounding.get(self.axes.vocab, ()))
        return -(-size // devices) * devices

    def devices(self, mesh_axes: Iterable[str]) -> int:
        """Number of devices along `mesh_axes` together."""
        return math.prod(self.layout.mesh[axis] for axis in mesh_axes)

    def cut(self, parameter: Parameter) -> int:
        """Into how many parts the parameter rests."""
        return math.prod(self.devices(self.params.get(axis, ())) for axis in parameter.axes)

    def bytes(self, parameters: Iterable[Parameter]) -> dict[str, int]:
        """Path -> bytes per device, the largest first."""
        width = itemsize(self.workload.param_dtype)
        found = {p.path: p.size * width // self.cut(p) for p in parameters}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @cached_property
    def resting_bytes(self) -> int:
        """Parameters per device, at rest; a mesh axis that is on two dimensions of one of them cuts it once."""
        width = itemsize(self.workload.param_dtype)
        return sum(
            p.size * width // self.devices({m for axis in p.axes for m in self.params.get(axis, ())})
            for p in self.axes.parameters
        )

    def not_cut_by(self, parameters: Iterable[Parameter], mesh_axes: Iterable[str]) -> list[Parameter]:
        """Those of `parameters` that none of `mesh_axes` cuts at rest."""
        wanted = set(mesh_axes)
        return [p for p in parameters if not any(wanted & set(self.params.get(axis, ())) for axis in p.axes)]

    def keys(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Keys that say something of the logical axes `axes`, each once."""
        entries = (*self.layout.compute_entries, *self.layout.param_entries)
        wanted = set(axes)
        return tuple(dict.fromkeys(entry.key for entry in entries if entry.axis in wanted))

    def size_key(self, mesh_axis: str) -> str:
        """Key of the size of a mesh axis; of `data` in the flat schema, which takes what is left, that of `model`."""
        if not self.is_flat:
            return f"trainer.mesh.axes.{mesh_axis}"
        return "trainer.replica_ici_axis_size" if mesh_axis == "replica" else "trainer.model_axis_size"

    @property
    def mapping_keys(self) -> tuple[str, str]:
        """Keys of the mappings in which a logical axis is mapped for computing and resting, and for resting alone."""
        if self.is_flat:
            return "trainer.axis_resources", "trainer.parameter_axis_resources"
        return "trainer.mesh.shared_mapping", "trainer.mesh.param_mapping"


def short(path: str) -> str:
    """The last two names of a parameter's path, which a person tells it by."""
    return ".".join(path.split(".")[-2:])


def sizes_text(parameters: Mapping[str, int], most: int = 4) -> str:
    """`a.weight 1.50, b.weight 0.50 GiB`, of the first `most`."""
    shown = ", ".join(f"{short(path)} {amount / GIB:.2f}" for path, amount in [*parameters.items()][:most])
    more = len(parameters) - most
    return f"{shown} GiB" + (f" and {more} more" if more > 0 else "")


def names_text(names: Iterable[str]) -> str:
    """`a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def product_text(mesh: Mapping[str, int], mesh_axes: Iterable[str]) -> str:
    """`replica 2 x data 16`."""
    return mesh_text({axis: mesh[axis] for axis in mesh_axes})


Findings = Iterator[Finding]

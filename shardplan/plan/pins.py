"""Pins and prohibitions: the grammar of `--pin` and `--forbid`, and the constraints on a plan that they express.

| text | constrains |
|---|---|
| `mlp=model`, `mlp=model+replica`, `position=` (replicated) | the compute sharding of a logical axis |
| `params.embed=data` | the parameter (storage) sharding of a logical axis |
| `q_proj.weight:kv_head=model,embed=data` | the storage of one parameter; its other axes are replicated |
| `mesh.model=8` | the mesh |

`--forbid` also takes a logical axis alone: `vocab` is then not sharded in computations, `params.vocab` not as stored.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardplan.errors import ConfigError, nearest
from shardplan.hardware.mesh_axes import MESH_AXES
from shardplan.model.axes import ModelAxes
from shardplan.plan.mapping import MeshAxes, MeshShape
from shardplan.plan.workload.workload import BATCH_AXIS

STORED, MESH = "params.", "mesh."
"""Prefix of rules for stored parameters, and prefix of rules for the mesh; rules without one are for computations."""


@dataclass(frozen=True)
class Rule:
    """A constraint on the mesh axes of one logical axis."""

    axis: str
    is_stored: bool
    """Whether the rule constrains stored parameters rather than computations."""
    mesh_axes: MeshAxes | None
    """Mesh axes, major to minor; None for any mesh axes."""

    @property
    def subject(self) -> tuple[str, bool]:
        """The logical axis and the mapping that the rule constrains; two pins must not have equal subjects."""
        return self.axis, self.is_stored

    def excludes(self, mesh_axes: MeshAxes) -> bool:
        """Return whether this rule, as a prohibition, excludes sharding over `mesh_axes`."""
        return bool(mesh_axes) if self.mesh_axes is None else bool(set(mesh_axes) & set(self.mesh_axes))

    def __str__(self) -> str:
        name = f"{STORED if self.is_stored else ''}{self.axis}"
        return name if self.mesh_axes is None else f"{name}={'+'.join(self.mesh_axes)}"


@dataclass(frozen=True)
class MeshSize:
    """A constraint on the number of devices along one mesh axis."""

    mesh_axis: str
    devices: int

    @property
    def subject(self) -> tuple[str, bool]:
        """The mesh axis, in the form of `Rule.subject`."""
        return f"{MESH}{self.mesh_axis}", False

    def __str__(self) -> str:
        return f"{MESH}{self.mesh_axis}={self.devices}"


@dataclass(frozen=True)
class Rules:
    """The pins and prohibitions that a plan must satisfy."""

    pins: tuple[Rule, ...] = ()
    """Rules for logical axes that must have exactly these mesh axes."""
    forbidden: tuple[Rule, ...] = ()
    """Rules for logical axes that must not have any of these mesh axes."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Mesh axis -> number of devices that it must have."""
    forbidden_sizes: frozenset[tuple[str, int]] = frozenset()

    def options(self, axis: str, is_stored: bool, options: Iterable[MeshAxes]) -> list[MeshAxes]:
        """Return the allowed options of `options`; for a pinned axis only its pin, even if it is not in `options`."""
        pinned = [pin.mesh_axes or () for pin in self.pins if pin.subject == (axis, is_stored)]
        prohibitions = [rule for rule in self.forbidden if rule.subject == (axis, is_stored)]
        return pinned or [option for option in options if not any(rule.excludes(option) for rule in prohibitions)]

    def allows(self, mesh: MeshShape) -> bool:
        """Return whether no mesh axis has a forbidden size."""
        return not self.forbidden_sizes & set(mesh.items())


def parse_rules(pins: Sequence[str], forbidden: Sequence[str], axes: ModelAxes) -> Rules:
    """Parse the texts of `--pin` and `--forbid`.

    >>> from shardplan.model.axes import Parameter
    >>> parameters = (Parameter("mlp.up_proj.weight", {"mlp": 64, "embed": 32}, "float32"),)
    >>> axes = ModelAxes("llama", parameters, "embed", "position", "vocab")
    >>> rules = parse_rules(["mlp=model", "mesh.model=4"], ["params.embed"], axes)
    >>> [str(rule) for rule in (*rules.pins, *rules.forbidden)], rules.sizes
    (['mlp=model', 'params.embed'], {'model': 4})

    Raises:
        ConfigError: a logical axis, mesh axis or tensor is unknown, a pin has no `=`, or rules contradict each other.
    """
    by_subject: dict[tuple[str, bool], tuple[str, Rule | MeshSize]] = {}
    for text in pins:
        for pin in parse_pin(text, axes):
            before, other = by_subject.setdefault(pin.subject, (text, pin))
            if other != pin:
                raise ConfigError(f"pins {before!r} and {text!r} contradict each other on {pin.subject[0]}; keep one")
    prohibitions = [rule for text in forbidden for rule in _parse("forbid", text, axes)]
    for text, pin in by_subject.values():
        for rule in prohibitions:
            if isinstance(pin, Rule) and isinstance(rule, Rule) and rule.subject == pin.subject:
                contradicts = rule.excludes(pin.mesh_axes or ())
            else:
                contradicts = pin == rule
            if contradicts:
                raise ConfigError(f"pin {text!r} sets {pin}, which forbid {rule} excludes; leave one out")
    parsed = [pin for _, pin in by_subject.values()]
    return Rules(
        tuple(pin for pin in parsed if isinstance(pin, Rule)),
        tuple(rule for rule in prohibitions if isinstance(rule, Rule)),
        {pin.mesh_axis: pin.devices for pin in parsed if isinstance(pin, MeshSize)},
        frozenset((rule.mesh_axis, rule.devices) for rule in prohibitions if isinstance(rule, MeshSize)),
    )


def parse_pin(text: str, axes: ModelAxes, key: str = "pin") -> list[Rule | MeshSize]:
    """Parse one pin.

    >>> from shardplan.model.axes import Parameter
    >>> parameters = (Parameter("mlp.up_proj.weight", {"mlp": 64, "embed": 32}, "float32"),)
    >>> axes = ModelAxes("llama", parameters, "embed", "position", "vocab")
    >>> [(rule.axis, rule.mesh_axes) for rule in parse_pin("mlp=model", axes)]
    [('mlp', ('model',))]

    Args:
        key: the configuration key of the pin, for messages.

    Raises:
        ConfigError: see `parse_rules`.
    """
    rules = _parse(key, text, axes)
    for rule in rules:
        if isinstance(rule, Rule) and rule.mesh_axes is None:
            name = rule.axis if ":" in text else str(rule)
            raise ConfigError(
                f"{key} {text!r} has no '=' after {name}: write {name}=model to shard it, {name}= to replicate it"
            )
    tensor, separator, _ = text.partition(":")
    if not separator:
        return rules
    named = {rule.subject[0] for rule in rules}
    return rules + [Rule(axis, True, ()) for axis in _axes_of(key, text, tensor, axes) if axis not in named]


def _parse(key: str, text: str, axes: ModelAxes) -> list[Rule | MeshSize]:
    """Parse one pin into its rules: for a logical axis, a mesh axis, or the axes of a tensor."""
    tensor, separator, rest = text.partition(":")
    if not separator:
        return [_parse_size(key, text) if text.startswith(MESH) else _parse_rule(key, text, axes)]
    own = _axes_of(key, text, tensor, axes)
    rules = [_parse_rule(key, f"{STORED}{each}", axes) for each in rest.split(",") if each]
    for rule in rules:
        if rule.axis not in own:
            raise ConfigError(f"{key} {text!r}: {tensor} has no axis {rule.axis!r}; {nearest(rule.axis, own)}")
    return [*rules]


def _parse_rule(key: str, text: str, axes: ModelAxes) -> Rule:
    """Parse the pin or prohibition of a logical axis; without `=` it concerns every sharding of the axis."""
    name, separator, mesh = text.partition("=")
    is_stored, axis = name.startswith(STORED), name.removeprefix(STORED)
    known = [*axes.axes] if is_stored else [BATCH_AXIS, axes.position, *axes.axes]
    if axis not in known:
        raise ConfigError(f"{key} {text!r}: the model has no axis {axis!r}; {nearest(axis, known)}")
    mesh_axes = tuple(each for each in mesh.replace(",", "+").split("+") if each)
    for each in mesh_axes:
        if each not in MESH_AXES:
            raise ConfigError(f"{key} {text!r}: unknown mesh axis {each!r}; {nearest(each, MESH_AXES)}")
        if mesh_axes.count(each) > 1:
            raise ConfigError(f"{key} {text!r} names mesh axis {each!r} twice; leave one out")
    return Rule(axis, is_stored, mesh_axes if separator else None)


def _parse_size(key: str, text: str) -> MeshSize:
    """Parse the pinned or forbidden size of a mesh axis, `mesh.model=8`."""
    name, _, count = text.removeprefix(MESH).partition("=")
    if name not in MESH_AXES:
        raise ConfigError(f"{key} {text!r}: unknown mesh axis {name!r}; {nearest(name, MESH_AXES)}")
    if not count.isdecimal() or int(count) < 1:
        raise ConfigError(f"{key} {text!r} has no number of devices; write for example {MESH}{name}=8")
    return MeshSize(name, int(count))


def _axes_of(key: str, text: str, tensor: str, axes: ModelAxes) -> tuple[str, ...]:
    """Return the logical axes of the parameters whose path ends with `tensor`."""
    matches = [parameter for parameter in axes.parameters if f".{parameter.path}".endswith(f".{tensor}")]
    if not matches:
        # of every path as many last components as the text has
        names = {".".join(parameter.path.split(".")[-len(tensor.split(".")) :]) for parameter in axes.parameters}
        raise ConfigError(f"{key} {text!r}: no parameter is called {tensor!r}; {nearest(tensor, names)}")
    if len({tuple(parameter.axes) for parameter in matches}) > 1:
        several = " and ".join(parameter.path for parameter in matches[:2])
        raise ConfigError(
            f"{key} {text!r}: {tensor!r} matches {several}, which have different axes; write more of the path"
        )
    return tuple(matches[0].axes)

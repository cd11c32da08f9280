"""What the user pins or forbids of a plan, as text.

| text | of |
|---|---|
| `mlp=model`, `mlp=model+replica`, `position=` (whole) | a logical axis while computing |
| `params.embed=data` | a logical axis of parameters at rest |
| `q_proj.weight:kv_head=model,embed=data` | the axes of one parameter at rest, the others whole |
| `mesh.model=8` | the mesh |

What is forbidden may be an axis alone, `experts` or `params.vocab`: then it is not cut at all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardplan.config import MESH_AXES
from shardplan.errors import ConfigError, nearest
from shardplan.model import ModelAxes
from shardplan.plan.mapping import MeshAxes, MeshShape
from shardplan.plan.plan import BATCH_AXIS

AT_REST, MESH = "params.", "mesh."
"""Begin a rule for parameters at rest, and one for the mesh; any other is for computing."""


@dataclass(frozen=True)
class Rule:
    """One logical axis, and mesh axes for it."""

    axis: str
    at_rest: bool
    mesh_axes: MeshAxes | None
    """Major to minor; None for whatever they are."""

    @property
    def subject(self) -> tuple[str, bool]:
        """What it is about."""
        return self.axis, self.at_rest

    def excludes(self, mesh_axes: MeshAxes) -> bool:
        """Whether this, forbidden, speaks against `mesh_axes`."""
        return bool(mesh_axes) if self.mesh_axes is None else bool(set(mesh_axes) & set(self.mesh_axes))

    def __str__(self) -> str:
        name = f"{AT_REST if self.at_rest else ''}{self.axis}"
        return name if self.mesh_axes is None else f"{name}={'+'.join(self.mesh_axes)}"


@dataclass(frozen=True)
class Size:
    """One mesh axis, and how many devices it has."""

    mesh_axis: str
    devices: int

    @property
    def subject(self) -> tuple[str, bool]:
        """What it is about."""
        return f"{MESH}{self.mesh_axis}", False

    def __str__(self) -> str:
        return f"{MESH}{self.mesh_axis}={self.devices}"


@dataclass(frozen=True)
class Rules:
    """What a plan must keep to."""

    pins: tuple[Rule, ...] = ()
    """Logical axes that must have exactly these mesh axes."""
    forbidden: tuple[Rule, ...] = ()
    """Logical axes that must not have any of these mesh axes."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Mesh axis -> how many devices it must have."""
    forbidden_sizes: frozenset[tuple[str, int]] = frozenset()

    def options(self, axis: str, at_rest: bool, options: Iterable[MeshAxes]) -> list[MeshAxes]:
        """Those of `options` that are allowed; what is pinned even if it is none of them."""
        pinned = [pin.mesh_axes or () for pin in self.pins if pin.subject == (axis, at_rest)]
        banned = [rule for rule in self.forbidden if rule.subject == (axis, at_rest)]
        return pinned or [option for option in options if not any(rule.excludes(option) for rule in banned)]

    def allows(self, mesh: MeshShape) -> bool:
        """Whether no mesh axis has a size that is forbidden."""
        return not self.forbidden_sizes & set(mesh.items())


def parse_rules(pins: Sequence[str], forbidden: Sequence[str], axes: ModelAxes) -> Rules:
    """The rules that the texts of `--pin` and `--forbid` say.

    Raises:
        ConfigError: a logical axis, mesh axis or tensor that there is not, a pin without `=`, or rules that contradict
            each other.
    """
    kept: dict[tuple[str, bool], tuple[str, Rule | Size]] = {}
    for text in pins:
        for pin in parse_pin(text, axes):
            before, other = kept.setdefault(pin.subject, (text, pin))
            if other != pin:
                raise ConfigError(f"pins {before!r} and {text!r} want {pin.subject[0]} in two ways; keep one")
    banned = [rule for text in forbidden for rule in _parse("forbid", text, axes)]
    for text, pin in kept.values():
        for rule in banned:
            if isinstance(pin, Rule) and isinstance(rule, Rule) and rule.subject == pin.subject:
                contradicts = rule.excludes(pin.mesh_axes or ())
            else:
                contradicts = pin == rule
            if contradicts:
                raise ConfigError(f"pin {text!r} has {pin}, and forbid {rule} excludes that; leave one out")
    found = [pin for _, pin in kept.values()]
    return Rules(
        tuple(pin for pin in found if isinstance(pin, Rule)),
        tuple(rule for rule in banned if isinstance(rule, Rule)),
        {pin.mesh_axis: pin.devices for pin in found if isinstance(pin, Size)},
        frozenset((rule.mesh_axis, rule.devices) for rule in banned if isinstance(rule, Size)),
    )


def parse_pin(text: str, axes: ModelAxes) -> list[Rule | Size]:
    """The rules of one pin.

    Raises:
        ConfigError: see `parse_rules`.
    """
    rules = _parse("pin", text, axes)
    for rule in rules:
        if isinstance(rule, Rule) and rule.mesh_axes is None:
            raise ConfigError(f"pin {rule.axis!r}: say to what, as in {rule.axis}=model, or {rule.axis}= for whole")
    tensor, separator, _ = text.partition(":")
    if not separator:
        return rules
    named = {rule.subject[0] for rule in rules}
    return rules + [Rule(axis, True, ()) for axis in _axes_of("pin", text, tensor, axes) if axis not in named]


def _parse(key: str, text: str, axes: ModelAxes) -> list[Rule | Size]:
    """The rules of one text, without those for axes of a tensor that it does not name."""
    tensor, separator, rest = text.partition(":")
    if not separator:
        return [_size(key, text) if text.startswith(MESH) else _rule(key, text, axes)]
    own = _axes_of(key, text, tensor, axes)
    found = [_rule(key, f"{AT_REST}{each}", axes) for each in rest.split(",") if each]
    for rule in found:
        if rule.axis not in own:
            raise ConfigError(f"{key} {text!r}: {tensor} has no axis {rule.axis!r}; {nearest(rule.axis, own)}")
    return [*found]


def _rule(key: str, text: str, axes: ModelAxes) -> Rule:
    name, separator, mesh = text.partition("=")
    at_rest, axis = name.startswith(AT_REST), name.removeprefix(AT_REST)
    known = [*axes.axes] if at_rest else [BATCH_AXIS, axes.position, *axes.axes]
    if axis not in known:
        raise ConfigError(f"{key} {text!r}: the model has no axis {axis!r}; {nearest(axis, known)}")
    mesh_axes = tuple(each for each in mesh.replace(",", "+").split("+") if each)
    for each in mesh_axes:
        if each not in MESH_AXES:
            raise ConfigError(f"{key} {text!r}: unknown mesh axis {each!r}; {nearest(each, MESH_AXES)}")
    return Rule(axis, at_rest, mesh_axes if separator else None)


def _size(key: str, text: str) -> Size:
    name, _, count = text.removeprefix(MESH).partition("=")
    if name not in MESH_AXES:
        raise ConfigError(f"{key} {text!r}: unknown mesh axis {name!r}; {nearest(name, MESH_AXES)}")
    if not count.isdecimal() or int(count) < 1:
        raise ConfigError(f"{key} {text!r}: say how many devices, as in {MESH}{name}=8")
    return Size(name, int(count))


def _axes_of(key: str, text: str, tensor: str, axes: ModelAxes) -> tuple[str, ...]:
    """The axes of the parameters that are called `tensor`."""
    found = [parameter for parameter in axes.parameters if f".{parameter.path}".endswith(f".{tensor}")]
    if not found:
        paths = [parameter.path for parameter in axes.parameters]
        raise ConfigError(f"{key} {text!r}: no parameter is called {tensor!r}; {nearest(tensor, paths)}")
    if len({tuple(parameter.axes) for parameter in found}) > 1:
        several = " and ".join(parameter.path for parameter in found[:2])
        raise ConfigError(f"{key} {text!r}: {tensor!r} is {several}, which have different axes; say which")
    return tuple(found[0].axes)

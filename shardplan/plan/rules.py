"""What the user pins or forbids of a plan, as text: `mlp=model`, `params.embed=replica+data`, `position=`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardplan.config import MESH_AXES
from shardplan.errors import ConfigError, nearest
from shardplan.model import ModelAxes
from shardplan.plan.mapping import MeshAxes
from shardplan.plan.plan import BATCH_AXIS

AT_REST = "params."
"""Begins a rule for parameters at rest; any other is for computing."""


@dataclass(frozen=True)
class Rule:
    """One logical axis, and mesh axes for it."""

    axis: str
    at_rest: bool
    mesh_axes: MeshAxes | None
    """Major to minor; None for whatever they are."""


@dataclass(frozen=True)
class Rules:
    """What a plan must keep to."""

    pins: tuple[Rule, ...] = ()
    """Logical axes that must have exactly these mesh axes."""
    forbidden: tuple[Rule, ...] = ()
    """Logical axes that must not have any of these mesh axes."""

    def options(self, axis: str, at_rest: bool, options: Iterable[MeshAxes]) -> list[MeshAxes]:
        """Those of `options` that are allowed; what is pinned even if it is none of them."""
        pinned = [pin.mesh_axes or () for pin in self.pins if (pin.axis, pin.at_rest) == (axis, at_rest)]
        banned = [rule.mesh_axes for rule in self.forbidden if (rule.axis, rule.at_rest) == (axis, at_rest)]
        return pinned or [option for option in options if not any(_meets(option, ban) for ban in banned)]


def _meets(option: MeshAxes, banned: MeshAxes | None) -> bool:
    return bool(option) if banned is None else bool(set(option) & set(banned))


def parse_rules(pins: Sequence[str], forbidden: Sequence[str], axes: ModelAxes) -> Rules:
    """The rules that the texts of `--pin` and `--forbid` say.

    A pin is `axis=mesh axes joined by +`, or `tensor:axis=mesh axes,...` for the axes of a parameter at rest, of which
    those that are not named are whole. What is forbidden may be an axis alone: then it is not cut at all.

    Raises:
        ConfigError: a logical axis, mesh axis or tensor that there is not, or a pin without `=`.
    """
    kept: list[Rule] = []
    for text in pins:
        tensor, separator, rest = text.partition(":")
        kept += _tensor(text, tensor, rest, axes) if separator else [_rule("pin", text, axes)]
    for rule in kept:
        if rule.mesh_axes is None:
            raise ConfigError(f"pin {rule.axis!r}: say to what, as in {rule.axis}=model, or {rule.axis}= for whole")
    return Rules(tuple(kept), tuple(_rule("forbid", text, axes) for text in forbidden))


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


def _tensor(text: str, tensor: str, rest: str, axes: ModelAxes) -> list[Rule]:
    paths = [parameter.path for parameter in axes.parameters]
    found = [parameter for parameter in axes.parameters if parameter.path.endswith(tensor)]
    if not found:
        raise ConfigError(f"pin {text!r}: no parameter's path ends with {tensor!r}; {nearest(tensor, paths)}")
    named = [_rule("pin", f"{AT_REST}{each}", axes) for each in rest.split(",") if each]
    whole = [axis for axis in found[0].axes if axis not in {rule.axis for rule in named}]
    return [*named, *(Rule(axis, True, ()) for axis in whole)]

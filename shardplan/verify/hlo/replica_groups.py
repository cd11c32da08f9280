"""Parses which partitions take part in a collective: replica groups, and source-target pairs of permutes."""

import math

from shardplan.verify.hlo.module import split_integers, split_names


def parse_replica_groups(text: str, devices: int) -> list[tuple[int, ...]] | None:
    """Parse groups of partitions: `{{0,1},{2,3}}`, `[2,4]<=[8]`, `[4,2]<=[2,4]T(1,0)`, `mesh['a'=2,'b'=4] {'b'}`.

    Empty text means one group of all `devices`; None if the notation is not understood.

    >>> parse_replica_groups("{{0,1},{2,3}}", devices=4)
    [(0, 1), (2, 3)]
    >>> parse_replica_groups("[2,2]<=[4]", devices=4)
    [(0, 1), (2, 3)]
    >>> parse_replica_groups("[2,2]<=[2,2]T(1,0)", devices=4)
    [(0, 2), (1, 3)]
    """
    text = text.strip()
    if text in ("", "{}"):
        return [tuple(range(devices))]
    if text.startswith("{"):
        return [split_integers(group) for group in text.strip("{}").split("},{")]
    if "<=" in text:
        shape, _, source = text.partition("<=")
        dims, _, order = source.partition("T")
        values = _transpose_iota(split_integers(dims.strip("[]")), split_integers(order.strip("()")))
        return _rows(values, split_integers(shape.strip("[]"))[-1])
    if text.startswith("mesh["):
        return _mesh_groups(text)
    return None


def parse_source_target_pairs(text: str) -> list[tuple[int, int]]:
    """Parse the (source, target) partition numbers of `{{0,1},{1,0}}`.

    >>> parse_source_target_pairs("{{0,1},{1,0}}")
    [(0, 1), (1, 0)]
    """
    return [(pair[0], pair[1]) for pair in map(split_integers, text.strip("{}").split("},{"))]


def _mesh_groups(text: str) -> list[tuple[int, ...]] | None:
    """Return the groups of `mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}`; None for another form.

    Groups along parts of mesh axes have another form. Without `device_ids`, devices are in order.
    """
    declared, _, rest = text.removeprefix("mesh[").partition("]")
    ids, brace, used = rest.rpartition("{")
    sizes = {}
    for item in declared.split(","):
        name, _, size = item.strip().partition("=")
        if not size.isdigit():
            return None
        sizes[name] = int(size)
    chosen = split_names(used.strip().removesuffix("}"))
    if not brace or not set(chosen) <= set(sizes):
        return None  # parts of axes
    devices = list(range(math.prod(sizes.values())))
    ids = ids.strip().removeprefix(",").strip()
    if ids:
        tile, _, order = ids.removeprefix("device_ids=(").removesuffix(")").partition("T")
        devices = _transpose_iota(split_integers(tile.strip("[]")), split_integers(order.strip("()")))
    names = list(sizes)
    dims = [*(i for i, name in enumerate(names) if name not in chosen), *(names.index(name) for name in chosen)]
    indices = _transpose_iota(tuple(sizes.values()), tuple(dims))
    return _rows([devices[index] for index in indices], math.prod(sizes[name] for name in chosen))


def _transpose_iota(dims: tuple[int, ...], order: tuple[int, ...]) -> list[int]:
    """Return `arange(prod(dims)).reshape(dims).transpose(order)`, flattened; an empty `order` keeps dims."""
    values = [0]
    for dimension in order or range(len(dims)):
        stride = math.prod(dims[dimension + 1 :])
        values = [value + k * stride for value in values for k in range(dims[dimension])]
    return values


def _rows(values: list[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(values[i : i + size]) for i in range(0, len(values), size)]

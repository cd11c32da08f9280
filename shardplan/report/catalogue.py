"""Prints the supported models, or the facts about one model, and converts both to JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from shardplan.catalogue.model_types import Feature, TypeFacts
from shardplan.catalogue.names import RefusedTypes
from shardplan.catalogue.released import ReleasedModel
from shardplan.report.text import make_table, print_bullets, print_fact, print_first_fitting, print_wrapped

LIST_LENGTH = 8
"""Maximum length of a list in a config.json that is printed in full."""


def print_overview(types: Sequence[TypeFacts], refused: Sequence[RefusedTypes], out: Console) -> None:
    """Print the supported types with their features, the released models, and the unsupported types."""
    count = sum(len(each.released) for each in types)
    print_first_fitting(_support_tables(f"{len(types)} model types", types), out)
    out.print(f"\n[bold]{count} released models, by name[/bold]")
    for each in types:
        print_wrapped(", ".join(each.released), out, f"  {each.type}: ", indent=" " * 4)
    out.print("\n[bold]Not supported[/bold]")
    print_bullets(map(_refusal, refused), out)


def print_type(facts: TypeFacts, out: Console) -> None:
    """Print the facts about a supported model type."""
    print_fact("model type", facts.type, out)
    print_fact("family", facts.about, out)
    if facts.levanter_class is not None:
        print_fact("in training", f"{facts.levanter_class}, as in Levanter's scripts; else shardplan's decoder", out)
    print_fact("supported", ", ".join(facts.features), out)
    missing = [each for each in Feature if each not in facts.features]
    if missing:
        print_fact("not supported", ", ".join(missing), out)
    if facts.methods:
        strategies = ", ".join(dict.fromkeys(method.strategy for method in facts.methods))
        orders = " or ".join(dict.fromkeys(method.order for method in facts.methods))
        print_fact("sequence", f"sharded by {strategies}, in {orders} order", out)
    print_fact("keys", f"{', '.join(facts.keys)}; any other key that may change the model is refused", out)
    only = [f"{key} {' or '.join(map(json.dumps, values))}" for key, values in sorted(facts.only.items())]
    if only:
        print_fact("only", ", ".join(only), out)
    print_fact("released", ", ".join(facts.released), out)


def print_model(facts: ReleasedModel, out: Console) -> None:
    """Print the size of a released model, its layers by kind of attention, and its config.json."""
    print_fact("model", ", ".join([facts.name, *facts.repositories]), out)
    print_fact("parameters", f"{facts.parameters:,}", out)
    print_fact("positions", f"{facts.positions:,}", out)
    for kind, layers in facts.layers.items():
        print_fact("layers", f"{layers} x {kind.name}", out)
    keys = (f"{key} {_short(value)}" for key, value in facts.config.items())
    print_fact("config.json", ", ".join(keys), out)


def print_refusal(refused: RefusedTypes, name: str, out: Console) -> None:
    """Print why a model type is not supported."""
    print_fact("model type", f"{name}, not supported", out)
    print_fact("nearest", refused.nearest or "none", out)
    print_fact("differences", refused.differences, out)


def overview_json(types: Sequence[TypeFacts], refused: Sequence[RefusedTypes]) -> dict[str, Any]:
    """Return the supported and the unsupported types as JSON values."""
    return {"types": [_type_json(each) for each in types], "refused": [asdict(each) for each in refused]}


def model_json(
    model: ReleasedModel | None = None, supported: TypeFacts | None = None, refused: RefusedTypes | None = None
) -> dict[str, Any]:
    """Return the facts about one model or type as JSON values; null for facts that are None."""
    released = None
    if model is not None:
        layers = [{"attention": kind.name, **asdict(kind), "layers": count} for kind, count in model.layers.items()]
        released = {**vars(model), "layers": layers}
    return {
        "model": released,
        "type": None if supported is None else _type_json(supported),
        "refused": None if refused is None else asdict(refused),
    }


def _type_json(facts: TypeFacts) -> dict[str, Any]:
    return {**asdict(facts), "methods": [method._asdict() for method in facts.methods]}


def _support_tables(title: str, types: Sequence[TypeFacts]) -> Iterator[Table]:
    """Yield tables of the features of each type, the widest first."""
    features = [each.value for each in Feature]
    for has_family in (True, False):
        texts = ("type", *(("family", "also Levanter's") if has_family else ()), *features)
        table = make_table(title, texts, is_narrow=True)
        for each in types:
            support = ("yes" if feature in each.features else "no" for feature in Feature)
            levanter_class = (each.levanter_class or "").rpartition(":")[2]
            about = (each.family, levanter_class) if has_family else ()
            table.add_row(each.type, *about, *support)
        yield table


def _refusal(refused: RefusedTypes) -> str:
    nearest = f"; nearest is {refused.nearest}" if refused.nearest else ""
    return f"{', '.join(refused.types)}: {refused.differences}{nearest}"


def _short(value: Any) -> str:
    """Return a value of a config.json as JSON; a long list becomes its number of values."""
    match value:
        case list() if len(value) > LIST_LENGTH:
            return f"[{len(value)} values]"
        case dict():
            return "{" + ", ".join(f"{key} {_short(each)}" for key, each in value.items()) + "}"
        case _:
            return json.dumps(value)

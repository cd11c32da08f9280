"""The cache of compile results: files named by a digest of everything that determines them."""

import ast
import dataclasses
import hashlib
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from shardplan.model.model_class import DECODER, class_of
from shardplan.model.own_model import own_code
from shardplan.plan.plan import Plan
from shardplan.verify.case import Case
from shardplan.verify.compiler.compiled import Compiled, package_versions
from shardplan.verify.model_facts import ModelFacts

CODE = (
    "hardware/*", "runtime/devices", "runtime/private_jax", "model/attention/attention_calls", "model/corrections/*",
    "model/gradient_checkpointing/activation_names", "model/huggingface/hf_config", "model/huggingface/rope_keys",
    "model/inspect", "model/logits/*", "model/registry", "execution/*", "steps/*", "checkpoint/levanter_loader",
    "verify/compiler/topology", "verify/compiler/worker",
)  # fmt: skip
"""Modules of shardplan that make the compiled program from a plan, as glob patterns of their paths without suffix."""
SEQUENCE_CODE = (
    "attention/**/*", "positions/*", "model/attention/chunked_mask", "model/attention/mask_pattern",
    "program/marked/attention_kind", "program/marked/marked_attention",
)  # fmt: skip
"""Modules that also make the program if the plan shards positions, and always for the decoder."""
DECODER_CODE = (
    "decoder/**/*", "model/dtypes/*", "model/gradient_checkpointing/kept_selection", "model/huggingface/kept_codes",
    "model/huggingface/quantization", "model/huggingface/read_quantization",
)  # fmt: skip
"""Modules that also make the program of the decoder."""
EXPERT_CODE = ("experts/**/*", "model/axis_sharding", "model/replaceable")
"""Modules that also make the program if the plan has a method of experts, and always for the decoder."""
FACTS_CODE = (
    "cost/**/*", "decoder/**/*", "experts/**/*", "model/**/*", "positions/*", "program/**/*", "steps/*",
    "verify/model_facts",
)  # fmt: skip
"""Modules that compute the facts about a model, see `shardplan.verify.model_facts`."""


def digest(case: Case) -> str:
    """Return the cache key of a compiled program; search statistics and estimates are not part of it."""
    plan = case.plan
    decisive = {
        **_model(case),
        "workload": vars(plan.workload),
        "slice": plan.hardware.slice,
        "mesh": list(plan.mesh.items()),
        "mappings": [plan.compute_mapping, plan.param_mapping],
        "attention": dataclasses.asdict(plan.attention),
        **_experts(plan),
        "program": case.program,
        "options": case.options,
        "versions": package_versions(),
        "code": code_digest(_program_code(case)),
    }
    return _sha256(decisive)


def facts_digest(case: Case) -> str:
    """Return the cache key of facts about the model of `case`, and of the check that the plan fits it."""
    plan = case.plan
    decisive = {
        **_model(case),
        "axes": plan.model.axes,
        "workload": vars(plan.workload),
        "attention": dataclasses.asdict(plan.attention),
        **_experts(plan),
        # the rows of a block of experts depend on its sharding
        "rows": [] if plan.experts is None else [list(plan.mesh.items()), plan.compute_mapping],
        "program": case.program,
        "versions": package_versions(),
        "code": code_digest(FACTS_CODE),
    }
    return _sha256(decisive)


def _program_code(case: Case) -> tuple[str, ...]:
    """Return the glob patterns of the modules that make the program of a case."""
    is_decoder = class_of(case.hf_config) == DECODER
    uses_own_attention = is_decoder or case.plan.attention.is_sequence_parallel
    uses_own_experts = is_decoder or case.plan.experts is not None
    return (
        *CODE,
        *(SEQUENCE_CODE if uses_own_attention else ()),
        *(DECODER_CODE if is_decoder else ()),
        *(EXPERT_CODE if uses_own_experts else ()),
    )


def _model(case: Case) -> dict[str, Any]:
    """Return the inputs that determine the model: its config.json, and the code of a user's own model."""
    code = own_code(case.hf_config)
    return {"hf_config": case.hf_config, **({} if code is None else {"own_code": code})}


def _experts(plan: Plan) -> dict[str, Any]:
    """Return the plan's method for routed experts; nothing for a model without experts."""
    return {} if plan.experts is None else {"experts": dataclasses.asdict(plan.experts)}


def _sha256(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@cache
def code_digest(patterns: tuple[str, ...]) -> str:
    """Return the SHA-256 of modules of shardplan, without comments, docstrings and imports.

    Args:
        patterns: glob patterns of the modules' paths without suffix.
    """
    root = Path(__file__).parents[1]
    result = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in root.glob(f"{pattern}.py")):
        result.update(normalize_code(path.read_text(encoding="utf-8")).encode())
    return result.hexdigest()


def normalize_code(code: str) -> str:
    """Return the syntax tree of a module, without comments, docstrings and imports.

    >>> normalize_code("x = 1  # one") == normalize_code("x=1")
    True
    """
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.If):
            node.body = [statement for statement in node.body if not _is_ignored(statement)]
    return ast.dump(tree)


def _is_ignored(statement: ast.stmt) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or isinstance(statement, ast.Import | ast.ImportFrom)


def cache_path(case: Case, folder: str | None, memory_only: bool = False) -> Path | None:
    """Return the file that caches the result of `case`; None without a cache folder.

    Args:
        memory_only: whether a result without cycles is enough; a cached result with cycles is preferred.
    """
    if folder is None:
        return None
    path = Path(folder).expanduser() / f"{digest(case)[:32]}.json.gz"
    return path.with_name(f"memory-{path.name}") if memory_only and not path.exists() else path


def facts_path(case: Case, folder: str | None) -> Path | None:
    """Return the file that caches the facts about the model of `case`; None without a cache folder."""
    return None if folder is None else Path(folder).expanduser() / f"{facts_digest(case)[:32]}.json"


def store(value: Compiled | ModelFacts, path: Path) -> None:
    """Write `value` to `path` atomically, so that no reader sees a partial file.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "facts.json")
    ...     store(ModelFacts(flops=1e12, attended_fraction=0.5, routed_rows=None), path)
    ...     ModelFacts.load(path)
    ModelFacts(flops=1000000000000.0, attended_fraction=0.5, routed_rows=None)
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
        pass
    value.save(Path(part.name))
    Path(part.name).replace(path)

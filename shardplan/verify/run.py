"""Compile plans, each in a process of its own, several at a time, and remember what came out."""

import ast
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import shardplan
from shardplan.config import CompilerConfig
from shardplan.errors import ConfigError
from shardplan.hardware import GIB, parse_slice
from shardplan.model import Model
from shardplan.plan.plan import UNCUT, Plan
from shardplan.runtime.writable import check_writable
from shardplan.verify.compiled import Compiled
from shardplan.verify.read import read_verdict
from shardplan.verify.topology import environment
from shardplan.verify.verdict import REFUSED, UNDECIDED, Verdict
from shardplan.verify.worker import LOAD, versions

PROGRAMS = "jit_(evaluate|train|prefill|assemble)"
"""Of which the compiler leaves a report: not of the small ones that JAX runs while it traces."""
PYTHON_ERROR = 1
"""Exit code of a Python process that an exception ended."""
POLL_SECONDS = 0.1
CODE = (
    "hardware/*", "runtime/devices", "model/levanter_compat", "model/forward", "model/hf_config", "model/registry",
    "step/*", "checkpoint/levanter_loader", "verify/worker", "verify/topology",
)  # fmt: skip
"""Modules of shardplan that make what is compiled of a plan."""
ATTENTION = ("attention/**/*", "positions/*")
"""Those that do so too where the plan cuts positions."""


@dataclass(frozen=True)
class Case:
    """One program to compile."""

    label: str
    plan: Plan
    model: Model
    hf_config: dict[str, Any]
    program: str = "step"
    """`step`, or `load`."""
    options: dict[str, str] = field(default_factory=dict)

    @property
    def program_name(self) -> str:
        """eval, train, prefill or load."""
        return LOAD if self.program == LOAD else self.plan.workload.kind


def verify(
    cases: Sequence[Case], compiler: CompilerConfig, on_verdict: Callable[[Case, Verdict], None] = lambda *_: None
) -> list[Verdict]:
    """The compiler's verdict on every case, in their order.

    Args:
        compiler: limits, the number of compiles at a time, the cache.
        on_verdict: called as each is known, from threads.

    Raises:
        ConfigError: libtpu is not installed, a case is not for a TPU slice, or the cache cannot be written.
    """
    if find_spec("libtpu") is None:
        raise ConfigError("verifying needs the TPU compiler, libtpu; install it with: pip install 'shardplan[verify]'")
    environments = [environment(parse_slice(case.plan.hardware.slice)) for case in cases]
    if compiler.cache is not None:
        check_writable("compiler.cache", str(Path(compiler.cache).expanduser() / "writable"))
    # not in the threads: Python 3.11 cannot parse code in several at once
    paths = [_cached(case, compiler) for case in cases]
    stop = threading.Event()
    # the same case twice is compiled once
    locks: defaultdict[Path | None, threading.Lock] = defaultdict(threading.Lock)

    def one(case: Case, variables: dict[str, str], path: Path | None) -> Verdict:
        with locks[path] if path is not None else threading.Lock():
            verdict = _judge(case, variables, compiler, path, stop)
        on_verdict(case, verdict)
        return verdict

    pool = ThreadPoolExecutor(compiler.jobs or os.cpu_count() or 1)
    try:
        futures = [pool.submit(one, *each) for each in zip(cases, environments, paths, strict=True)]
        return [future.result() for future in futures]
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _judge(
    case: Case, variables: dict[str, str], compiler: CompilerConfig, path: Path | None, stop: threading.Event
) -> Verdict:
    plan = case.plan
    duplicate = _duplicate(plan)
    if duplicate:
        return _unread(case, REFUSED, duplicate)
    compiled = Compiled.load(path) if path is not None else None
    if compiled is None:
        result = _compile(case, variables, compiler, stop)
        if isinstance(result, str):
            return _unread(case, UNDECIDED, result)
        compiled = result
        if path is not None:
            _store(compiled, path)
    return read_verdict(compiled, plan, case.model, case.program_name, case.options)


def _unread(case: Case, outcome: str, reason: str) -> Verdict:
    plan = case.plan
    return Verdict(
        outcome, reason, case.program_name, plan.hardware.slice, plan.mesh, case.options, "", 0.0, versions()
    )


def _duplicate(plan: Plan) -> str:
    """Why JAX would refuse to shard a parameter: two of its logical axes on one mesh axis. Empty where it would not."""
    for parameter in plan.parameters:
        users: dict[str, list[str]] = {}
        for axis, mesh_axes in zip(parameter.axes, parameter.spec, strict=True):
            for mesh_axis in mesh_axes or ():
                users.setdefault(mesh_axis, []).append(axis)
        for mesh_axis, axes in users.items():
            if len(axes) > 1:
                return f"DuplicateSpecError: {', '.join(axes)} of {parameter.path} are all mapped to {mesh_axis!r}"
    return ""


def _compile(case: Case, variables: dict[str, str], compiler: CompilerConfig, stop: threading.Event) -> Compiled | str:
    """What the compiler makes of `case`, or why it was given up."""
    with tempfile.TemporaryDirectory(prefix="shardplan-verify-") as folder:
        request, answer, dump = (Path(folder) / name for name in ("request.json", "compiled.json.gz", "dump"))
        request.write_text(json.dumps(_request(case)), encoding="utf-8")
        inherited = {key: value for key, value in os.environ.items() if key != "LIBTPU_INIT_ARGS"}
        flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_module_re={PROGRAMS}"
        with open(Path(folder) / "log", "w+b") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "shardplan.verify.worker", str(request), str(answer), str(dump)],
                env={**inherited, **variables, "XLA_FLAGS": flags},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                stopped = _wait(process, compiler, stop)
            finally:
                process.kill()
                process.wait()
            log.seek(0)
            output = log.read().decode(errors="replace").strip()
        if stopped:
            return stopped
        compiled = Compiled.load(answer)
        if compiled is not None:
            return compiled
        if process.returncode == PYTHON_ERROR:  # the compiler's own errors are verdicts: this is ours
            raise RuntimeError(f"{case.label}: the worker failed\n{output}")
        return f"the compiler ended with code {process.returncode}: {(output.splitlines() or [''])[-1][:300]}"


def _wait(process: subprocess.Popen[bytes], compiler: CompilerConfig, stop: threading.Event) -> str:
    """Wait for the process to end; why it was given up, if it was."""
    deadline = time.monotonic() + compiler.seconds
    while process.poll() is None:
        if stop.is_set():
            return "interrupted"
        if time.monotonic() > deadline:
            return f"not compiled in {compiler.seconds} s; raise compiler.seconds"
        if _resident_gib(process.pid) > compiler.gib:
            return f"compiling took more than {compiler.gib:g} GiB of this machine; raise compiler.gib"
        time.sleep(POLL_SECONDS)
    return ""


def _resident_gib(pid: int) -> float:
    """Memory of a process; 0 once it has ended. libtpu exists for Linux only, and so does this file."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / GIB


def _request(case: Case) -> dict[str, Any]:
    return {
        "plan": case.plan.to_json(),
        "hf_config": case.hf_config,
        "program": case.program,
        "options": case.options,
    }


def _cached(case: Case, compiler: CompilerConfig) -> Path | None:
    """Where what comes out of `case` is kept; None without a cache."""
    if compiler.cache is None:
        return None
    return Path(compiler.cache).expanduser() / f"{digest(case)[:32]}.json.gz"


def digest(case: Case) -> str:
    """Of what decides what is compiled, and not of how the plan was found, or what it predicts."""
    plan = case.plan
    decisive = {
        "hf_config": case.hf_config,
        "workload": vars(plan.workload),
        "slice": plan.hardware.slice,
        "mesh": list(plan.mesh.items()),
        "mappings": [plan.compute_mapping, plan.param_mapping],
        "attention": vars(plan.attention),
        "program": case.program,
        "options": case.options,
        "versions": versions(),
        "code": code_digest(CODE if plan.attention.strategy == UNCUT else (*CODE, *ATTENTION)),
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


@cache
def code_digest(patterns: tuple[str, ...]) -> str:
    """Of modules of shardplan, as far as they do something; `patterns` are of their paths without suffix."""
    root = Path(shardplan.__file__).parent
    found = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in root.glob(f"{pattern}.py")):
        found.update(_meaning(path.read_text(encoding="utf-8")).encode())
    return found.hexdigest()


def _meaning(code: str) -> str:
    """A module without comments, docstrings, and where names come from."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.If):
            node.body = [each for each in node.body if not _is_silent(each)]
    return ast.dump(tree)


def _is_silent(statement: ast.stmt) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or isinstance(statement, ast.Import | ast.ImportFrom)


def _store(compiled: Compiled, path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
        pass
    compiled.save(Path(part.name))
    Path(part.name).replace(path)

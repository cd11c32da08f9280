"""Compile plans, each in a process of its own, several at a time, and remember the verdicts."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import shardplan
from shardplan.config import CompilerConfig
from shardplan.errors import ConfigError
from shardplan.hardware import GIB, parse_slice
from shardplan.plan.plan import Plan
from shardplan.verify.topology import environment
from shardplan.verify.verdict import REFUSED, Verdict

PROGRAMS = "jit_(evaluate|train|prefill|assemble)"
"""Of which the compiler leaves a report: not of the small ones that JAX runs while it traces."""
PYTHON_ERROR = 1
"""Exit code of a Python process that an exception ended."""
POLL_SECONDS = 0.1
PACKAGES = ("jax", "jaxlib", "libtpu", "haliax", "levanter", "equinox", "optax")
"""A verdict holds for these versions."""
CODE = ("hardware", "model", "plan", "step", "checkpoint", "verify")
"""Packages of shardplan whose code makes a verdict."""


@dataclass(frozen=True)
class Case:
    """One program to compile."""

    label: str
    plan: Plan
    hf_config: dict[str, Any]
    program: str = "step"
    options: dict[str, str] = field(default_factory=dict)


def verify(
    cases: Sequence[Case], compiler: CompilerConfig, on_verdict: Callable[[Case, Verdict], None] = lambda *_: None
) -> list[Verdict]:
    """The compiler's verdict on every case, in their order.

    Args:
        compiler: limits, the number of compiles at a time, the cache.
        on_verdict: called as each is known, from threads.

    Raises:
        ConfigError: libtpu is not installed, or a case is not for a TPU slice.
    """
    if find_spec("libtpu") is None:
        raise ConfigError("verifying needs the TPU compiler, libtpu; install it with: pip install 'shardplan[verify]'")
    environments = [environment(parse_slice(case.plan.hardware.slice)) for case in cases]

    def one(case: Case, variables: dict[str, str]) -> Verdict:
        cached = _cached(case, compiler)
        verdict = _read(cached) or _compile(case, variables, compiler)
        if cached is not None:
            _write(cached, verdict)
        on_verdict(case, verdict)
        return verdict

    with ThreadPoolExecutor(compiler.jobs or os.cpu_count() or 1) as pool:
        return list(pool.map(one, cases, environments))


def _compile(case: Case, variables: dict[str, str], compiler: CompilerConfig) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="shardplan-verify-") as folder:
        request, answer, dump = (Path(folder) / name for name in ("request.json", "verdict.json", "dump"))
        request.write_text(json.dumps(_request(case)), encoding="utf-8")
        flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_module_re={PROGRAMS}"
        with open(Path(folder) / "log", "w+b") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "shardplan.verify.worker", str(request), str(answer), str(dump)],
                env={**os.environ, **variables, "XLA_FLAGS": flags},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                stopped = _wait(process, compiler)
            finally:
                process.kill()
                process.wait()
            log.seek(0)
            output = log.read().decode(errors="replace").strip()
        verdict = _read(answer)
        if verdict is not None:
            return verdict
        if process.returncode == PYTHON_ERROR:  # the compiler's own errors are verdicts: this is ours
            raise RuntimeError(f"{case.label}: the worker failed\n{output}")
        last = (output.splitlines() or [""])[-1]
        reason = stopped or f"the compiler ended with code {process.returncode}: {last[:300]}"
    plan = case.plan
    seconds = float(compiler.seconds) if stopped else 0.0
    return Verdict(
        REFUSED, reason, case.program, plan.hardware.slice, plan.mesh, case.options, "", seconds, plan.versions
    )


def _wait(process: subprocess.Popen[bytes], compiler: CompilerConfig) -> str:
    """Wait for the process to end; why it was given up, if it was."""
    deadline = time.monotonic() + compiler.seconds
    while process.poll() is None:
        if time.monotonic() > deadline:
            return f"not compiled in {compiler.seconds} s; raise compiler.seconds"
        used = _resident_gib(process.pid)
        if used > compiler.gib:
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
    """Where the verdict on `case` is kept; None without a cache."""
    if compiler.cache is None:
        return None
    plan = case.plan
    # what decides the verdict, and not how the plan was found or what it is called
    decisive = {
        "hf_config": case.hf_config,
        "workload": vars(plan.workload),
        "slice": plan.hardware.slice,
        "mesh": list(plan.mesh.items()),
        "mappings": [plan.compute_mapping, plan.param_mapping],
        "program": case.program,
        "options": case.options,
        "limits": [compiler.seconds, compiler.gib],
        "versions": {package: metadata.version(package) for package in PACKAGES},
        "code": _code_digest(),
    }
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()
    return Path(compiler.cache).expanduser() / f"{digest[:32]}.json"


@cache
def _code_digest() -> str:
    root = Path(shardplan.__file__).parent
    digest = hashlib.sha256()
    for package in CODE:
        for path in sorted((root / package).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path | None) -> Verdict | None:
    try:
        return Verdict.from_json(json.loads(path.read_text(encoding="utf-8"))) if path is not None else None
    except (OSError, ValueError):
        return None  # not there, or not written to its end


def _write(path: Path, verdict: Verdict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(verdict.to_json()), encoding="utf-8")
    part.replace(path)

"""Compiles cases, several at a time, and returns the compiler's verdicts."""

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from shardplan.config.sections import CompilerConfig
from shardplan.errors import ConfigError
from shardplan.hardware import parse_slice
from shardplan.plan.plan import Plan
from shardplan.runtime.writable import check_folder_writable
from shardplan.verify.cache import cache_path, facts_digest, facts_path, store
from shardplan.verify.case import Case
from shardplan.verify.compiler.compiled import Compiled, package_versions
from shardplan.verify.compiler.libtpu import INSTALL_LIBTPU, libtpu_environment
from shardplan.verify.compiler.run_worker import CompileStopped, compile_case
from shardplan.verify.model_facts import ModelFacts, compute_facts
from shardplan.verify.read import read_verdict
from shardplan.verify.verdict import DuplicateMeshAxis, Outcome, Reason, Verdict


def verify(
    cases: Sequence[Case],
    compiler: CompilerConfig,
    on_verdict: Callable[[Case, Verdict], None] = lambda *_: None,
    on_compile: Callable[[Case], None] = lambda _: None,
) -> list[Verdict]:
    """Return the compiler's verdict on every case, in the order of the cases.

    Args:
        compiler: limits, the number of simultaneous compiles, and the cache folder.
        on_verdict: called from threads with each verdict as soon as it is known.
        on_compile: called from threads with each case that is not in the cache, when its compile starts.

    Raises:
        ConfigError: libtpu is not installed, a case is not for a TPU slice, its plan is for another model, or the cache
            cannot be written.
    """
    if find_spec("libtpu") is None:
        raise ConfigError(f"verifying needs the TPU compiler, libtpu; install it with: {INSTALL_LIBTPU}")
    environments = [libtpu_environment(parse_slice(case.plan.hardware.slice)) for case in cases]
    if compiler.cache is not None:
        check_folder_writable("compiler.cache", str(Path(compiler.cache).expanduser()))
    paths = [cache_path(case, compiler.cache, compiler.memory_only) for case in cases]
    facts = _find_facts(cases, compiler.cache)
    stop = threading.Event()
    # several cases with the same cache file are compiled once
    locks: defaultdict[Path | None, threading.Lock] = defaultdict(threading.Lock)

    def run_case(case: Case, model: ModelFacts, variables: dict[str, str], path: Path | None) -> Verdict:
        with locks[path] if path is not None else threading.Lock():
            verdict = _judge(case, model, variables, compiler, path, stop, on_compile)
        on_verdict(case, verdict)
        return verdict

    pool = ThreadPoolExecutor(compiler.jobs or os.cpu_count() or 1)
    try:
        futures = [pool.submit(run_case, *each) for each in zip(cases, facts, environments, paths, strict=True)]
        return [future.result() for future in futures]
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _find_facts(cases: Sequence[Case], folder: str | None) -> list[ModelFacts]:
    """Return the facts about the model of every case, computed once per model and workload.

    Args:
        folder: the cache folder.
    """
    digests = [facts_digest(case) for case in cases]
    by_digest: dict[str, ModelFacts] = {}
    for case, digest in zip(cases, digests, strict=True):
        if digest in by_digest:
            continue
        path = facts_path(case, folder)
        facts = ModelFacts.load(path) if path is not None else None
        if facts is None:
            facts = compute_facts(case)
            if path is not None:
                store(facts, path)
        by_digest[digest] = facts
    return [by_digest[digest] for digest in digests]


def _judge(
    case: Case,
    model: ModelFacts,
    variables: dict[str, str],
    compiler: CompilerConfig,
    path: Path | None,
    stop: threading.Event,
    on_compile: Callable[[Case], None],
) -> Verdict:
    """Return the verdict on a case, compiling it unless its plan is refused or its result is cached.

    Args:
        model: facts about the model of the case.
        path: cache file; None to compile without a cache.
        stop: stops the compilation when set; the verdict is then undecided.
    """
    duplicate = _find_duplicate(case.plan)
    if duplicate is not None:
        return _verdict_without_compile(case, Outcome.REFUSED, duplicate)
    compiled = Compiled.load(path) if path is not None else None
    if compiled is None:
        on_compile(case)
        try:
            compiled = compile_case(case, variables, compiler, stop)
        except CompileStopped as stopped:
            return _verdict_without_compile(case, Outcome.UNDECIDED, stopped.reason)
        if path is not None:
            store(compiled, path)
    return read_verdict(compiled, case.plan, model, case.program_kind, case.options)


def _verdict_without_compile(case: Case, outcome: Outcome, reason: Reason) -> Verdict:
    plan = case.plan
    return Verdict(
        outcome, reason, case.program_kind, plan.hardware.slice, plan.mesh, case.options, "", 0.0, package_versions()
    )


def _find_duplicate(plan: Plan) -> DuplicateMeshAxis | None:
    """Return a mesh axis that shards two axes of one parameter, which JAX would refuse; None without one."""
    for parameter in plan.parameters:
        users: dict[str, list[str]] = {}
        for axis, mesh_axes in zip(parameter.axes, parameter.spec, strict=True):
            for mesh_axis in mesh_axes or ():
                users.setdefault(mesh_axis, []).append(axis)
        for mesh_axis, axes in users.items():
            if len(axes) > 1:
                return DuplicateMeshAxis(parameter.path, axes, mesh_axis)
    return None

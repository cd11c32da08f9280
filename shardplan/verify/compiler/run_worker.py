"""Runs the compile worker in a separate process, with limits of time and memory."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from shardplan.config.sections import CompilerConfig
from shardplan.hardware import GIB
from shardplan.plan.workload.kinds import KINDS
from shardplan.verify.case import Case
from shardplan.verify.compiler.compiled import Compiled
from shardplan.verify.verdict import CompilerCrash, Interrupted, MemoryLimit, Reason, TimeLimit

PROGRAMS = f"jit_({'|'.join((*(f'{name}_step' for name in KINDS), 'assemble'))})"
"""Pattern for the names of modules that the compiler reports on; it excludes small ones that run while tracing."""
PYTHON_ERROR = 1
"""Exit code of a Python process that an exception ended."""
POLL_SECONDS = 0.1
MAX_LINE = 300
"""Maximum characters that a reason keeps of the output's last line."""


class CompileStopped(Exception):
    """A compile ended without a result, for `reason`."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


def compile_case(case: Case, variables: dict[str, str], compiler: CompilerConfig, stop: threading.Event) -> Compiled:
    """Compile `case` in a new process.

    Args:
        variables: environment variables of the new process, in addition to the variables of this process.
        compiler: limits of time and memory.
        stop: event that ends the new process as soon as it is set.

    Raises:
        CompileStopped: a limit was reached, `stop` was set, or the compiler crashed.
        RuntimeError: the worker failed with an exception of its own.
    """
    with tempfile.TemporaryDirectory(prefix="shardplan-verify-") as folder:
        request, answer, dump = (Path(folder) / name for name in ("request.json", "compiled.json.gz", "dump"))
        request.write_text(json.dumps(_request(case, compiler)), encoding="utf-8")
        inherited = {key: value for key, value in os.environ.items() if key != "LIBTPU_INIT_ARGS"}
        flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_module_re={PROGRAMS}"
        with open(Path(folder) / "log", "w+b") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "shardplan.verify.compiler", str(request), str(answer), str(dump)],
                env={**inherited, **variables, "XLA_FLAGS": flags},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                _wait(process, compiler, stop)
            finally:
                process.kill()
                process.wait()
            log.seek(0)
            output = log.read().decode(errors="replace").strip()
        compiled = Compiled.load(answer)
        if compiled is not None:
            return compiled
        if process.returncode == PYTHON_ERROR:  # the compiler's own errors are verdicts: this is a bug of the worker
            raise RuntimeError(f"{case.label}: the worker failed\n{output}")
        raise CompileStopped(CompilerCrash(process.returncode, (output.splitlines() or [""])[-1][:MAX_LINE]))


def _wait(process: subprocess.Popen[bytes], compiler: CompilerConfig, stop: threading.Event) -> None:
    """Wait for the process to end.

    Raises:
        CompileStopped: a limit was reached, or `stop` was set.
    """
    deadline = time.monotonic() + compiler.seconds
    while process.poll() is None:
        if stop.is_set():
            raise CompileStopped(Interrupted())
        if time.monotonic() > deadline:
            raise CompileStopped(TimeLimit(compiler.seconds))
        if _resident_gib(process.pid) > compiler.gib:
            raise CompileStopped(MemoryLimit(compiler.gib))
        time.sleep(POLL_SECONDS)


def _resident_gib(pid: int) -> float:
    """Return the resident memory of a process in GiB; 0 after it has ended. Linux only, like libtpu."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / GIB


def _request(case: Case, compiler: CompilerConfig) -> dict[str, object]:
    return {
        "plan": case.plan.to_json(),
        "hf_config": case.hf_config,
        "program": case.program,
        "options": case.options,
        "memory_only": compiler.memory_only,
    }

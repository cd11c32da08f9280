"""With `compiler.memory_only`, a verdict has the memory and the collectives of the whole compile, and no time."""

import dataclasses
from collections import Counter

import pytest
from conftest import run

from shardplan import config as configuration
from shardplan.config.command_flags import VerifyCommand
from shardplan.config.sections import CompilerConfig
from shardplan.verify import run as runs
from shardplan.verify.run import verify
from shardplan.verify.select_cases import build_cases
from shardplan.verify.verdict import Outcome

SMALL = ("--model.config=pythia-70m", "--hardware.slice=v5e-8", "--workload.batch=16", "--workload.position=512")
pytestmark = pytest.mark.usefixtures("forked_compiler")


def case_of(*flags):
    (case,) = build_cases(configuration.parse_config([*SMALL, *flags], VerifyCommand))
    return case


def received(verdict):
    """Bytes by kind of collective and mesh axes."""
    total = Counter()
    for each in verdict.collectives:
        total[each.kind, tuple(each.mesh_axes)] += each.bytes
    return total


@pytest.mark.parametrize(
    "flags",
    [
        ("--mesh.model=8",),
        pytest.param(("--workload.kind=train", "--workload.param_dtype=float32"), marks=pytest.mark.whole),
        pytest.param(
            ("--workload.kind=train", "--workload.gradient_checkpointing=offload_carries"), marks=pytest.mark.whole
        ),
    ],
    ids=["evaluation", "training", "host"],
)
def test_memory_and_collectives_are_those_of_the_whole_compile(flags, tmp_path, monkeypatch):
    case = case_of(*flags)
    compiler = CompilerConfig(cache=str(tmp_path), memory_only=True)
    (memory,) = verify([case], compiler)
    (whole,) = verify([case], dataclasses.replace(compiler, memory_only=False))
    assert memory.fits and memory.time is None and whole.time is not None
    assert memory.memory.host == whole.memory.host
    assert memory.memory.buffers[:3] == whole.memory.buffers[:3]
    # the report that it is read from rounds each array up to whole tiles
    assert whole.memory.peak <= memory.memory.peak <= 1.003 * whole.memory.peak
    assert memory.memory.arguments == pytest.approx(whole.memory.arguments, rel=1e-3)
    assert received(memory) == received(whole) and received(whole)
    # the whole result is of use to both; the other one is none for a verdict with a time
    monkeypatch.setattr(runs, "compile_case", lambda *_: pytest.fail("compiled again"))
    assert verify([case], compiler) == verify([case], dataclasses.replace(compiler, memory_only=False)) == [whole]


def test_a_program_that_does_not_fit():
    flags = ("--config=configs/405b.yaml", "--hardware.slice=v4-16", "--workload.batch=8", "--compiler.cache=null")
    (case,) = build_cases(configuration.parse_config([*flags], VerifyCommand))
    memory, whole = (
        verify([case], CompilerConfig(cache=None, memory_only=memory_only))[0] for memory_only in (True, False)
    )
    assert memory.outcome == whole.outcome == Outcome.DOES_NOT_FIT
    assert (memory.reason, memory.memory) == (whole.reason, whole.memory)


def test_the_first_plan_that_fits_is_chosen_by_estimate():
    done = run("plan", *SMALL, "--verify=2", "--compiler.memory_only=true", "--compiler.cache=null")
    assert done.returncode == 0
    assert "plan 1 by estimate, the first of 2 that fits by the TPU compiler" in done.stdout
    assert "the time of a step is not judged, because compiler.memory_only is set" in " ".join(done.stdout.split())

"""Plans whose pages tests draw, and verdicts of the compiler on them."""

import dataclasses
import functools

from shardplan import config
from shardplan.search.make_plan import make_plan
from shardplan.verify.verdict import (
    Buffer,
    CollectiveForm,
    CompiledCollective,
    CompiledMemory,
    CompiledTime,
    Omission,
    OmissionKind,
    Outcome,
    OutOfMemory,
    Verdict,
)

GIB = 2**30
FITS = Verdict(
    outcome=Outcome.FITS,
    reason=None,
    program="eval",
    slice="v5p-16",
    mesh={"replica": 1, "data": 8, "model": 1},
    options={},
    attention="splash",
    compile_seconds=1.0,
    versions={"libtpu": "1.2.3"},
    memory=CompiledMemory(3 * GIB, 2 * GIB, GIB, 0, 4 * GIB, [Buffer(GIB, "bf16[4]", "module.weight[0:2]")]),
    time=CompiledTime(2.0, 1.5, 0.0, 0.0, 4e12, 0.25, {}),
    collectives=[CompiledCollective("all-gather", ["data"], GIB, 32, 0.5, "mlp", CollectiveForm.ASYNC)],
    not_understood={Omission(OmissionKind.NO_CYCLES, "mystery"): 3},
)
TOO_LARGE = dataclasses.replace(
    FITS,
    outcome=Outcome.DOES_NOT_FIT,
    reason=OutOfMemory(GIB, [Buffer(GIB, "bf16[4]", "[all of it]")]),
    memory=dataclasses.replace(FITS.memory, peak=5 * GIB),
    time=None,
    collectives=[],
)

SETTINGS = (
    "--model.config=llama-3.1-8b", "--workload.batch=16", "--workload.position=2048", "--mesh.model=2",
    "--mesh.replica=2",
)  # fmt: skip


@functools.cache
def planned(kind):
    """A plan that evaluates or trains Llama-3.1-8B, over several mesh axes."""
    hardware = {"eval": "v5e-32", "train": "v4-256"}[kind]
    return make_plan(config.parse_config([f"--hardware.slice={hardware}", f"--workload.kind={kind}", *SETTINGS]))


def judged(plan, verdict=FITS):
    """A verdict as if on `plan`."""
    return dataclasses.replace(
        verdict,
        slice=plan.hardware.slice,
        mesh=plan.mesh,
        options=plan.compiler_options,
        program=plan.workload.kind,
    )

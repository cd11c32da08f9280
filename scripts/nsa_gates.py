"""The gates of two public reports on Native Sparse Attention, beside what `bench_nsa_run.py` recorded.

What the reports say is quoted here, by the letters that `nsa_page.py` gives them. A gate whose runs are missing was not
tried.
"""

from collections.abc import Callable
from typing import NamedTuple

from nsa_judges import (
    MAX_RATIO,
    REPORTED,
    Judgement,
    Records,
    judge_closed_form,
    judge_environment,
    judge_fallbacks,
    judge_guardrails,
    judge_health,
    judge_heartbeats,
    judge_host,
    judge_learning,
    judge_memory,
    judge_optimizer,
    judge_plans,
    judge_positions,
    judge_resumption,
    judge_routing,
    judge_scaling,
    judge_selection,
    judge_snapshots,
    judge_stability,
    judge_stall,
    judge_throughput,
    judge_too_slow,
    judge_types,
    trainings,
)

SAME_WORK = ("one", "ddp", "ddp-keeps-all", "fsdp-keeps-all", "fsdp-processes")
"""Runs with the batches of `fsdp`, by other plans."""


class Gate(NamedTuple):
    """A gate, what the reports say of it, and what the runs here did."""

    name: str
    theirs: str
    ours: str
    passes: bool | None
    """None where it was not tried."""


def make_gates(records: Records) -> list[Gate]:
    """Return all gates, judged by the records that there are."""
    gates = []
    for name, theirs, needed, judge in GATES:
        missing = [f"`{each}`" for each in needed if each not in records]
        if not needed and not trainings(records):
            missing = ["a run"]
        if missing:
            gates.append(Gate(name, theirs, f"needs {', '.join(missing)}", None))
        else:
            given = [records[each] for each in needed] or [trainings(records)]
            gates.append(Gate(name, theirs, *judge(*given)))
    return gates


GATES: tuple[tuple[str, str, tuple[str, ...], Callable[..., Judgement]], ...] = (
    ("launch guardrails", "none in the reports", ("refused",), judge_guardrails),
    (
        'stability: no "mark ready twice", no hang in the backward pass of step 1',
        "DDP crashed after 2 min 40 s (C), or hung (B); FSDP did 2 steps in 25 minutes (A)", (), judge_stability,
    ),
    ("memory below 30-40 GB a device", "27.5 GB under FSDP (A); 49 GB on one GPU (B)", (), judge_memory),
    (
        "throughput above 50 tokens/s, sequences of 2048", "4 tokens/s under FSDP on two A100 (A)",
        ("2048-one", "steps-2048"), judge_throughput,
    ),
    ("throughput gate of the command", "none in the reports", ("narrow-too-slow",), judge_too_slow),
    ("nothing of a step runs on the host", "a loop on the host in every layer (found later)", ("steps",), judge_host),
    ("routing: which kernel the branches run", "not captured before the timeout (A)", (), judge_routing),
    ("health of the selection's gates", "no statistics: the wrapped model has no such attribute (A)", (), judge_health),
    (
        "statistics of the selection, one sequence of 2048",
        ", ".join(f"{name} {value:g}" for name, value in REPORTED.items()), ("2048-one",), judge_selection,
    ),
    ("statistics equal to their closed form", "not generated (A), not reached (C)", (), judge_closed_form),
    ("fallbacks to another method", "counters not generated (A)", (), judge_fallbacks),
    ("audit of types", "all parameters bfloat16 (A)", (), judge_types),
    ("memory at boot, load and step 1", "boot and step 1 (A); not reached (C)", (), judge_snapshots),
    ("state of the optimizer", "149 MB (A)", ("fsdp",), judge_optimizer),
    ("heartbeats", "captured (A); 3 before the crash (C)", (), judge_heartbeats),
    ("stack dumps on a stall", "11 in 25 minutes, one every 180 s (A)", ("narrow-stalled",), judge_stall),
    ("record of the environment", "captured (A, C)", (), judge_environment),
    ("loss falls", "500 steps not reached (A)", ("fsdp",), judge_learning),
    ("losses do not depend on the plan", "not tried", ("fsdp", *SAME_WORK), judge_plans),
    ("positions sharded over 4 devices: the losses of one", "not tried", ("steps-2048",), judge_positions),
    ("resumed from a checkpoint", "not tried", ("resumed", "fsdp"), judge_resumption),
    (
        f"a step on 8 devices takes at most {MAX_RATIO} of its time on one",
        "233 s for a step on one GPU (B); 4 tokens/s on two (A)", ("steps-8x2048", "steps", "steps-64"),
        judge_scaling,
    ),
)  # fmt: skip
"""Name, what the reports say, the records that are judged (all trainings, if none is named), and the judge."""

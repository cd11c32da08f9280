"""The page of the two reports' gates is made of its records, and records of a bad run do not pass."""

import copy
import json

import bench_nsa_run
import nsa_judges
import pytest
from conftest import ROOT
from nsa_gates import make_gates
from nsa_page import make_page

PAGE = ROOT / "docs" / "benchmarks" / "nsa_run.md"
RUN = {"devices": 8, "batch": 8, "position": 64, "steps": 3, "arguments": [], "changes": {}, "processes": 1,
       "restarts_after": 0, "stalls_after": 0}  # fmt: skip
FIGURES = {"k_mean": 32.5, "rows": 12 * 8 * 64 * 2} | {
    f"gate_{name}_{branch}": 0.5 for name in ("mean", "entropy") for branch in nsa_judges.BRANCHES
}
GOOD = {
    "run": RUN, "codes": [[0]], "losses": [10.0, 9.0, 8.0], "step_seconds": [1.0, 1.0],
    "plan": {"param_mapping": {"embed": ["data"]}, "checkpointing": "default", "method": "dense_mask"},
    "selected_methods": {"dense_mask": list(range(12))}, "figures": FIGURES, "closed_form": {"k_mean": 32.5},
    "memory": {stage: {"arrays": 2**27, "host": 2**32} for stage in nsa_judges.STAGES},
    "audit": {"arrays": 28, "types": ["float32"], "methods": ["selected blocks of layer 0: dense_mask, as planned"]},
    "heartbeats": {"lines": 9, "with_statistics": 3}, "processes": [{"cpus": 2}],
}  # fmt: skip


def test_the_page_is_that_of_its_records():
    records = json.loads(PAGE.with_suffix(".json").read_text())
    names = (*bench_nsa_run.RUNS, *bench_nsa_run.STEPS, "refused")
    assert make_page(records, names, bench_nsa_run.COMMAND) == PAGE.read_text()
    for name, record in records.items():
        assert bench_nsa_run.settings_of(name).items() <= record.items(), f"{name} was made with other settings"


@pytest.mark.parametrize(
    ("judge", "path", "value"),
    [
        (nsa_judges.judge_stability, ("codes",), [[1]]),
        (nsa_judges.judge_stability, ("losses",), [10.0]),
        (nsa_judges.judge_memory, ("memory", "first step", "host"), 2**36),
        (nsa_judges.judge_routing, ("audit", "methods"), []),
        (nsa_judges.judge_health, ("figures", "gate_entropy_slc"), 0.0),
        (nsa_judges.judge_closed_form, ("figures", "k_mean"), 1.0),
        (nsa_judges.judge_closed_form, ("figures", "rows"), 1.0),
        (nsa_judges.judge_fallbacks, ("selected_methods",), {"gathered_blocks": [0]}),
        (nsa_judges.judge_types, ("audit", "types"), ["bfloat16", "float32"]),
        (nsa_judges.judge_snapshots, ("memory",), {"started": {}}),
        (nsa_judges.judge_heartbeats, ("heartbeats", "with_statistics"), 0),
        (nsa_judges.judge_environment, ("processes",), []),
    ],
)
def test_a_bad_run_fails_its_gate(judge, path, value):
    assert judge({"good": GOOD})[1]
    bad = inner = copy.deepcopy(GOOD)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert not judge({"good": GOOD, "bad": bad})[1]


def test_resumed_losses_are_equal_to_the_bit():
    resumed = {**GOOD, "run": {**RUN, "restarts_after": 2}, "codes": [[0], [0]]}
    assert nsa_judges.judge_resumption(resumed, GOOD)[1]
    assert not nsa_judges.judge_resumption({**resumed, "losses": [10.0, 9.0, 8.0000001]}, GOOD)[1]
    assert not nsa_judges.judge_resumption({**resumed, "codes": [[0]]}, GOOD)[1]  # it was not started again


def test_losses_of_other_plans():
    near, far = ({**GOOD, "losses": [10.0, 9.0, 8.0 * (1 + difference)]} for difference in (1e-6, 1e-4))
    assert nsa_judges.judge_plans(GOOD, near)[1]
    assert not nsa_judges.judge_plans(GOOD, near, far)[1]


def test_missing_runs_are_not_tried():
    assert all(gate.ours.startswith("needs") and gate.passes is None for gate in make_gates({}))


@pytest.mark.parametrize(("seconds", "passes"), [(12.9, True), (13.1, False)])
def test_the_sequences_that_the_model_is_made_for_decide_about_scaling(seconds, passes):
    def steps(position, eight):
        programs = {
            nsa_judges.SHARDED: {"processor": [eight] * 3, "wall": [eight]},
            nsa_judges.UNSHARDED: {"processor": [10.0] * 3, "wall": [10.0]},
        }
        return {"batch": 8, "position": position, "programs": programs}

    text, judged = nsa_judges.judge_scaling(steps(2048, seconds), steps(64, 20.0))
    assert judged is passes
    assert "2.00 with 8 x 64 tokens (+10.0 s)" in text

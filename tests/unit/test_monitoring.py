"""How a run is judged by its plan, and where its time is counted."""

import dataclasses
import json
import logging
import time

import pytest

from shardplan.config.sections import GateConfig
from shardplan.hardware import GIB
from shardplan.monitoring import heartbeat
from shardplan.monitoring.gate import describe_slowness, least_ratio
from shardplan.monitoring.goodput import ATTEMPTS, Attempt, describe_goodput
from shardplan.monitoring.memory import LOADED, STEPPED, MemoryUse, largest, warn_of_excess
from shardplan.monitoring.records import HEARTBEAT, RunRecords
from shardplan.monitoring.step_statistics import Count, LoopStatistics, StepTimer
from shardplan.runtime.processes.watch.activity import Activity
from shardplan.runtime.processes.watch.watch import Watch
from shardplan.search.make_plan import make_plan

PHASES = {"loading": 15.0, "compiling": 5.0, "evaluating": 60.0}
ATTEMPT = Attempt("now", PHASES, steps=55.0, waiting=40.0, blocked=10.0, stalled=3.0)


@pytest.fixture(scope="module")
def plan():
    from shardplan import config

    argv = ["--model.config=llama-3.1-8b", "--hardware.slice=v5e-8", "--workload.position=4096"]
    return make_plan(config.parse_config(argv, config.command_flags.PlanCommand))


@pytest.mark.parametrize(
    ("factor", "is_cpu", "ratio"), [(None, False, 0.3), (None, True, None), (0.0, False, None), (0.5, True, 0.5)]
)
def test_which_runs_are_judged(factor, is_cpu, ratio):
    assert least_ratio(GateConfig(factor), is_cpu) == ratio


@pytest.mark.slow
def test_a_slow_run_says_where_its_time_goes(plan):
    step = plan.cost.step_seconds
    tokens = plan.workload.batch * plan.workload.position
    assert describe_slowness(step / 0.31, plan, 0.3, ATTEMPT) is None
    assert describe_slowness(step / 0.25, plan, 0.3, ATTEMPT) == (
        f"{tokens / step / 4:,.0f} tokens/s is 0.25 of the {tokens / step:,.0f} that the plan predicts, below "
        "gate.factor 0.3; in 55.0 s of steps the host waited 10.0 s for the devices, and these 40.0 s for inputs; "
        "its own work took 5.0 s, and stalls 3.0 s; compiling took 5.0 s before"
    )


def test_goodput_counts_the_attempts_that_were_stopped():
    first = describe_goodput([], ATTEMPT)
    assert first["goodput"] == pytest.approx((55 - 40 - 3) / 80)
    second = describe_goodput(first[ATTEMPTS], Attempt("later", {"evaluating": 20.0}, steps=20.0, is_completed=True))
    assert second["goodput"] == pytest.approx((12 + 20) / 100) and second["seconds"] == 100
    assert [each["is_completed"] for each in second[ATTEMPTS]] == [False, True]


def test_steps_that_take_far_longer_are_stalls():
    statistics = LoopStatistics()
    timer, now = StepTimer(statistics), 100.0
    timer.add(Count(2, 20), now)
    for seconds in (1.0, 1.2, 0.8, 1.0, 31.0, 1.0, 2.9):
        now += seconds
        timer.add(Count(2, 20), now)
    assert statistics.stalled_seconds == pytest.approx(30.0)
    assert statistics.usual_step_seconds == pytest.approx((1.0 + 1.2 + 0.8 + 1.0 + 1.0 + 2.9) / 6)
    assert (statistics.windows, statistics.timed_windows, statistics.timed_tokens) == (16, 14, 140)
    assert statistics.seconds == pytest.approx(38.9)


def test_the_time_between_two_runs_of_a_program_is_not_counted():
    statistics = LoopStatistics()
    timer = StepTimer(statistics)
    for first in (100.0, 500.0):
        timer.start()
        timer.add(Count(1, 0), first)
        timer.add(Count(1, 0), first + 2.0)
    assert (statistics.windows, statistics.timed_windows) == (4, 2)
    assert statistics.seconds == pytest.approx(4.0) and statistics.stalled_seconds == 0


def test_memory_above_the_plan_is_a_warning(plan, caplog):
    planned = plan.memory
    use = MemoryUse(0, planned.parameters + GIB // 20, planned.peak, 0)
    with caplog.at_level(logging.WARNING):
        warn_of_excess(plan, LOADED, use)
        warn_of_excess(plan, STEPPED, use)
        assert not caplog.messages
        warn_of_excess(plan, LOADED, dataclasses.replace(use, in_use=2 * planned.parameters))
    assert caplog.messages == [
        f"memory after stage 'loaded': {2 * planned.parameters / GIB:.2f} GiB per device, planned are "
        f"{planned.parameters / GIB:.2f} GiB; memory.json has the parts"
    ]


def test_the_largest_of_all_processes_counts():
    assert largest([MemoryUse(1, None, 5, 7), MemoryUse(3, None, 4, 2)]) == MemoryUse(3, None, 5, 7)


def test_heartbeats_say_what_a_process_does(tmp_path):
    watch, records = Watch(), RunRecords(str(tmp_path), 3)
    with heartbeat.write_heartbeats(watch, records, interval_s=0.05):
        watch.set_activity(Activity("loading", 1, 7.0, doing="lm_head.weight"))
        time.sleep(0.3)
    lines = [json.loads(line) for line in (tmp_path / HEARTBEAT.format(3)).read_text().splitlines()]
    assert len(lines) >= 4 and lines[0]["phase"] == "starting"
    assert (lines[-1]["phase"], lines[-1]["done"], lines[-1]["doing"]) == ("loading", 7.0, "lm_head.weight")
    assert lines[-1]["seconds_without_progress"] >= 0.2


def test_heartbeats_reach_a_remote_folder():
    records = RunRecords("memory://bucket/run", 0)
    with heartbeat.write_heartbeats(Watch(), records, interval_s=60.0):  # only the first and the last line
        pass
    local = records.own_file(HEARTBEAT)
    records.close()
    assert len(records.read("heartbeat-0.jsonl").splitlines()) == 2 and not local.parent.exists()


def test_the_time_of_phases_adds_up():
    watch = Watch()
    for number, phase in enumerate(("loading", "evaluating", "loading"), 1):
        watch.set_activity(Activity(phase, number))
        time.sleep(0.05)
    seconds = watch.seconds()
    assert seconds.keys() == {"starting", "loading", "evaluating"}
    assert 0.1 <= seconds["loading"] < 1 and 0.05 <= seconds["evaluating"] < 1

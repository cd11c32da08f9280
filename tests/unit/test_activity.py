"""Which process is stuck, of those that do something, wait for values of others, or wait for their devices."""

import pytest

from shardplan.runtime.processes.watch.activity import Activity, CodeLocation, describe_stall, is_stalled, names_of

OWN, DEVICES = CodeLocation("data.py:31 in read", False), CodeLocation("train.py:9 in step", True)


@pytest.mark.parametrize(
    ("states", "places", "stuck"),
    [
        # process -> phase number, done, seconds without progress, whether it waits for the values of others
        ([(1, 3, 40, False), (1, 2, 41, False)], {1: OWN}, "process 1 is stuck while x (step 4), without progress for "
         "41 s, at data.py:31 in read; process 0 only waits for it"),
        ([(2, 0, 40, False), (1, 9, 41, False)], {}, "process 1 is stuck while x (step 4), without progress for 41 s, "
         "and does not answer: its code does not let Python run, or its network is cut; process 0 only waits for it"),
        ([(1, 3, 40, True), (2, 0, 40, False)], {1: DEVICES}, "process 1 is stuck while x (step 4), without progress "
         "for 40 s, at train.py:9 in step, which waits for the devices; process 0 only waits for it"),
        ([(1, 3, 40, False)] * 3, {0: DEVICES, 1: OWN, 2: DEVICES}, "process 1 is stuck while x (step 4), without "
         "progress for 40 s, at data.py:31 in read; processes 0, 2 only wait for it"),
        ([(1, 3, 40, False), (1, 3, 41, True)], {0: DEVICES, 1: OWN}, "process 0 is stuck while x (step 4), without "
         "progress for 40 s, at train.py:9 in step, which waits for the devices; process 1 only waits for it"),
        ([(1, 3, 40, False), (1, 3, 41, False)], {0: OWN, 1: OWN}, "processes 0-1 are stuck while x (step 4), without "
         "progress for 41 s, process 0 at data.py:31 in read"),
        # two that read unequal parts of a checkpoint: the one that has read less has no more to read
        ([(1, 9, 40, False), (1, 3, 41, False)], {0: OWN, 1: DEVICES}, "process 0 is stuck while x (step 4), without "
         "progress for 40 s, at data.py:31 in read; process 1 only waits for it"),
        ([(1, 3, 40, True), (1, 3, 41, True)], {0: OWN, 1: OWN}, "processes 0-1 are stuck while x (step 4), without "
         "progress for 41 s, process 0 at data.py:31 in read"),
    ],
)  # fmt: skip
def test_who_is_stuck(states, places, stuck):
    activities = {
        i: Activity("x", number, done, 30.0, "step 4", 100.0 - seconds)
        for i, (number, done, seconds, _) in enumerate(states)
    }
    waiting = {i for i, (*_, is_waiting) in enumerate(states) if is_waiting}
    assert is_stalled(activities, waiting, 100.0)
    assert describe_stall(activities, waiting, places, 100.0) == stuck


def test_a_stall_is_a_deadline_that_has_passed():
    """Of a process that does not wait for others, unless all do."""
    assert not is_stalled({0: Activity(deadline_s=30.0, since=70.0)}, set(), 100.0)
    activities = {0: Activity(deadline_s=30.0, since=99.0), 1: Activity(deadline_s=30.0, since=69.0)}
    stalled = [is_stalled(activities, waiting, 100.0) for waiting in (set(), {0}, {1}, {0, 1})]
    assert stalled == [True, True, False, True]


def test_names_of_many_processes():
    assert names_of([0, 1, 2, 5, 7, 8]) == "processes 0-2, 5, 7-8" and names_of([4]) == "process 4"

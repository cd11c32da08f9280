"""The hub of thousands of processes has little to do, and tells each of them no more than it needs."""

import pytest
from bench_fleet import HubOfFleet
from conftest import work_of

from shardplan.runtime.processes.hub.messages import MessageKind
from shardplan.runtime.processes.timing import TIMING

FLEET = 4096


def run_fleet(count):
    """Have a fleet meet, agree, wait for a text, give signs of life and end."""
    fleet, seconds = HubOfFleet(count), 10.0
    fleet.meet()
    assert fleet.replies == count
    fleet.agree()
    assert fleet.replies == 2 * count
    fleet.broadcast("x" * 100_000)
    assert fleet.replies == 3 * count - 1
    fleet.beat(seconds)
    assert fleet.replies == 3 * count - 1 + seconds / TIMING.beat_s  # to process 0
    before = fleet.replies
    fleet.from_all(MessageKind.EXCHANGE, lambda i: {"name": "x", "values": {str(i * 7 % count): i, "1": i}})
    assert fleet.replies - before == count
    fleet.end()


def test_the_hub_has_work_in_proportion_to_its_fleet():
    """Each message is answered by as many as there are receivers; the work grows with the fleet, not its square.

    The seconds that it takes are in docs/benchmarks/fleet.md.
    """
    small, large = (work_of(lambda count=count: run_fleet(count)) for count in (FLEET // 128, FLEET // 32))
    assert large == pytest.approx(4 * small, rel=0.1)


def test_a_fleet_learns_of_what_differs():
    fleet = HubOfFleet(FLEET)
    fleet.meet()
    answers = []
    for i in range(FLEET):
        message = {"kind": MessageKind.AGREE, "name": "a", "parts": {"x": str(i == 77)}, "problem": None}
        answers += fleet.hub.receive(i, message, 0.0)
    assert {each.to for each in answers} == {*range(FLEET)}
    assert answers[0].values == {"name": "a", "process": 77, "part": "x", "values": ["True", "False"]}


def test_the_end_of_a_fleet_that_failed():
    """All are told once, and then end one by one while they count on each other; nobody is told of each of them."""
    fleet = HubOfFleet(FLEET)
    fleet.meet()
    told = fleet.hub.receive(5, {"kind": MessageKind.LEAVE, "problem": "no memory"}, 0.0)
    assert len(told) == FLEET - 1
    assert not any(fleet.hub.close(i, 0.0) for i in range(FLEET) if i != 5)
    assert [reply.kind for reply in fleet.hub.tick(99.0)] == [MessageKind.ALIVE]
    # one that goes on after its own failure learns that the others have ended
    [answer] = fleet.hub.receive(5, {"kind": MessageKind.ENTER, "is_end": True}, 1.0)
    assert "has ended, and does not take part" in answer.values["text"]

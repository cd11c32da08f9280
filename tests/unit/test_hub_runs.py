"""All processes of a run learn that one of them is lost, has failed, has ended, or is stuck."""

import dataclasses
import re
import socket
import time

import pytest
from hub_runs import QUICK, ask, links, member, serve, together, wait, work

from shardplan.errors import PeerError
from shardplan.runtime.processes import link
from shardplan.runtime.processes.hub.hub_process import HubServer
from shardplan.runtime.processes.hub.messages import MessageKind, encode
from shardplan.runtime.processes.link import open_link
from shardplan.runtime.processes.watch.activity import Activity

pytestmark = pytest.mark.usefixtures("own_hub")


def test_a_process_that_fails():
    opened = links(3)

    def fail(each):
        raise ValueError("no memory")

    results = together(*(lambda i=i: work(opened[i], fail if i == 1 else wait) for i in range(3)))
    assert isinstance(results[1], ValueError)
    assert results[0] == results[2] == "process 1 of 3 failed: no memory; start the run again"


def test_a_process_that_is_killed():
    """The end of its connection tells the others, whichever it is."""
    opened = links(3)

    def die(each):
        time.sleep(0.2)
        each._connection.shutdown(socket.SHUT_RDWR)
        return "dead"

    opened[0].set_activity(Activity("loading", 1))
    results = together(*(lambda i=i: work(opened[i], die if i == 0 else wait) for i in range(3)))
    assert (
        results[1]
        == results[2]
        == "process 0 on a (pid 100) of 3 was lost while loading: its connection is closed; start the run again"
    )


def test_a_process_that_ended_before():
    """It has left the block of before, and takes no part in the next one."""
    opened = links(3)
    assert together(*(lambda i=i: work(opened[i], lambda each: "done") for i in range(3))) == ["done"] * 3
    opened[0]._connection.shutdown(socket.SHUT_RDWR)
    results = together(*(lambda i=i: work(opened[i], wait) for i in (1, 2)))
    assert set(results) == {"process 0 on a (pid 100) of 3 has ended, and does not take part; start the run again"}


def test_a_process_that_is_silent(monkeypatch):
    """As one that was stopped, or whose network is cut: no connection ends."""
    opened = links(3)
    monkeypatch.setattr(opened[2], "send", lambda *args, **values: None)
    opened[2]._depth = 1
    opened[2]._connection.sendall(encode(MessageKind.ENTER, is_end=False))
    results = together(*(lambda i=i: work(opened[i], wait) for i in range(2)))
    assert set(results) == {
        "process 2 on a (pid 102) of 3 was lost while starting: no sign of life for 1 s; start the run again"
    }


def test_a_process_that_is_stuck():
    """Its signs of life go on, and the others wait for it: those that have given a value, and those in a later step."""
    opened = links(3)
    for each, done in zip(opened, (5, 4, 5), strict=True):
        each.set_activity(Activity("evaluating", 2, done, deadline_s=0.5))
    results = together(*(lambda i=i: work(opened[i], wait) for i in range(3)))
    message = (
        r"process 1 is stuck while evaluating, without progress for \d s, at hub_runs\.py:\d+ in \w+; "
        r"processes 0, 2 only wait for it; start the run again"
    )
    assert all(re.fullmatch(message, result) for result in results)


def test_waiting_for_a_process_that_goes_on():
    """The one that waits may have a deadline that has long passed: the other one makes progress."""
    opened = links(2)

    def go_on(each):
        for done in range(12):
            each.set_activity(Activity("counting", 2, done, deadline_s=0.5))
            time.sleep(0.1)
        return ask(each)

    opened[0].set_activity(Activity("counting", 2, 0, deadline_s=0.5))
    assert together(lambda: work(opened[0], ask), lambda: work(opened[1], go_on)) == [[None, None]] * 2


def test_work_of_its_own_before_the_next_work():
    """Hours between two blocks of work, as of a program that trains in its own way, are no stall."""
    opened = links(2)
    for each in opened:
        each.set_activity(Activity("training", 2, 0, deadline_s=0.5))
    time.sleep(1.0)
    assert together(*(lambda each=each: work(each, ask) for each in opened)) == [[None, None]] * 2


def test_a_process_that_others_wait_for_in_vain():
    """It has not begun the work, and is named, not those that wait."""
    opened = links(3)
    for each in opened:
        each.set_activity(Activity("training", 2, 0, deadline_s=0.5))
    time.sleep(1.0)
    results = together(*(lambda i=i: work(opened[i], ask) for i in (0, 2)))
    message = (
        r"process 1 is stuck while working on its own, without progress for \d s, at .*; processes 0, 2 only wait for "
        "it; start the run again"
    )
    assert all(re.fullmatch(message, result) for result in results), results


def test_a_process_at_its_end(monkeypatch):
    """As after `if jax.process_index() == 0: save_pretrained(...)`: the others would wait for ever."""
    opened = links(3)

    def end(each):
        with each.work(is_end=True):
            return ask(each, link.END)

    def come_to_the_end(each):
        with pytest.raises(PeerError) as raised:
            end(each)
        return str(raised.value).partition("; what this process was doing is in ")[0]

    results = together(
        lambda: work(opened[0], ask), lambda: come_to_the_end(opened[1]), lambda: come_to_the_end(opened[2])
    )
    assert len({*results}) == 1
    assert re.fullmatch(
        r"process [12] of 3 has come to its end, and process 0 begins work that needs all of them; call the same "
        "functions of shardplan in every process, and start the run again", results[0]
    )  # fmt: skip


def test_work_after_a_failure():
    """Others have been told: neither they nor the process itself begin anything that would wait for ever."""
    opened = links(2)

    def fail(each):
        raise ValueError("no memory")

    assert isinstance(together(lambda: work(opened[1], fail))[0], ValueError)
    time.sleep(0.5)
    expected = [
        "process 1 of 2 failed: no memory; start the run again",
        "this process failed before (no memory), and the others know; start the run again",
    ]
    assert [work(each, ask) for each in opened] == expected


def test_a_process_that_exits_inside_of_the_work():
    """As all of them do with `sys.exit()`: one that does it a little later has not to fear the first."""
    opened = links(2)

    def exit(each, seconds):
        time.sleep(seconds)
        raise SystemExit

    def run(each, seconds):
        with pytest.raises(SystemExit):
            work(each, lambda each: exit(each, seconds))
        return each.problem

    assert together(lambda: run(opened[0], 0.0), lambda: run(opened[1], 0.5)) == [None, None]


def test_all_learn_which_process_has_ended():
    """Also one that does something of its own, and begins to wait when another has ended because of the first."""
    opened = links(3)
    opened[0]._connection.shutdown(socket.SHUT_RDWR)
    expected = "process 0 on a (pid 100) of 3 has ended, and does not take part; start the run again"
    assert together(lambda: work(opened[1], ask)) == [expected]
    opened[1]._connection.shutdown(socket.SHUT_RDWR)
    time.sleep(0.5)
    assert together(lambda: work(opened[2], ask)) == [expected]


def test_a_hub_that_takes_nothing(monkeypatch):
    """As one that is stopped: what sends to it, such as the thread that watches this process, goes on."""
    opened = links(2, dataclasses.replace(QUICK, hub_silence_s=1.0))
    monkeypatch.setattr(HubServer, "_read", lambda *_: time.sleep(0.1))
    started = time.monotonic()
    opened[1].send(MessageKind.GATHER, name="much", value="x" * 2**24)
    assert time.monotonic() - started < 5.0


def test_a_hub_that_is_silent(monkeypatch):
    """As one on a host whose network is cut; a hub that is there says so from time to time."""
    opened = links(2, dataclasses.replace(QUICK, hub_silence_s=0.5, hub_beat_s=0.2))
    time.sleep(1.0)
    assert opened[1].problem is None
    monkeypatch.setattr(HubServer, "_send", lambda *_: None)
    assert work(opened[1], wait) == link.LOST_HUB


@pytest.mark.slow
def test_a_process_that_takes_nothing(raises_message):
    """The others get their messages at once; it is lost after a while, and the hub goes on meanwhile."""
    timing = dataclasses.replace(QUICK, send_s=0.5, silence_s=30.0)
    address, _ = serve(3, timing=timing)
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as deaf:
        deaf.sendall(encode(MessageKind.HELLO, **vars(member(2, 3))))
        opened = together(*(lambda i=i: open_link(address, member(i, 3), print, timing=timing) for i in range(2)))
        deaf.sendall(encode(MessageKind.ENTER, is_end=False))
        for each in opened:
            each.send(MessageKind.ENTER, is_end=False)
        opened[1].send(MessageKind.BROADCAST, name="much")
        opened[0].send(MessageKind.BROADCAST, name="much", value="x" * 2**25)
        assert len(opened[1].wait_for(MessageKind.BROADCAST, "much")["value"]) == 2**25
        with raises_message(PeerError):
            opened[1].wait_for(MessageKind.GATHER, "never")

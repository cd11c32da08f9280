"""Processes meet at their hub before JAX connects them: all of them learn who is missing, or does not belong there."""

import re
import resource
import socket
import threading
import time

import jax
import pytest

from shardplan.errors import ConfigError, PeerError
from shardplan.runtime.processes import link, start
from shardplan.runtime.processes.hub import hub
from shardplan.runtime.processes.hub.hub import Hub, Member
from shardplan.runtime.processes.hub.hub_process import HubServer
from shardplan.runtime.processes.hub.messages import Kind, Lines, encode, listen
from shardplan.runtime.processes.link import open_link
from shardplan.runtime.processes.watch import watch
from shardplan.runtime.processes.watch.activity import Activity
from shardplan.runtime.processes.watch.stacks import Stacks

SECONDS = 10.0


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Lines, attempts and signs of life follow each other faster, and this process has no peers after the test."""
    monkeypatch.setattr(link, "_current", None)
    monkeypatch.setattr(hub, "LINES_AT_S", (0.2, 0.4))
    monkeypatch.setattr(hub, "REMEDY_AFTER_S", 0.3)
    monkeypatch.setattr(hub, "LATE_S", 2.0)
    monkeypatch.setattr(hub, "SILENCE_S", 1.0)
    monkeypatch.setattr(link, "RETRY_S", 0.05)
    monkeypatch.setattr(link, "LINE_S", 0.2)
    monkeypatch.setattr(watch, "BEAT_S", 0.1)
    monkeypatch.setattr(hub, "LOCATE_S", 1.0)
    monkeypatch.setattr("shardplan.runtime.processes.hub.hub_process.TICK_S", 0.05)
    monkeypatch.setattr(watch, "process_stacks", lambda: Stacks(tmp_path / "stacks.txt"))


def serve(count, limit_s=SECONDS):
    """Start a hub, and return its address and thread."""
    listener = listen(0)
    server = HubServer(listener, Hub(count, limit_s, time.monotonic(), lambda: "jax:1"))
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    return f"127.0.0.1:{listener.getsockname()[1]}", thread


def together(*actions):
    """Do something in a thread each; returns results, or errors."""
    results = [None] * len(actions)

    def run(i):
        try:
            results[i] = actions[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return results


def meet(members, limit_s=SECONDS, delays=(), count=None):
    """The link or the error of each process, and the lines that it reports."""
    address, _ = serve(count or members[0].count, limit_s)
    lines = [[] for _ in members]

    def come(i):
        time.sleep(delays[i] if delays else 0)
        return open_link(address, members[i], lines[i].append, limit_s)

    return together(*(lambda i=i: come(i) for i in range(len(members)))), lines


def member(index, count, facts=None, host="a"):
    return Member(index, count, host, 100 + index, facts or {"jax": "1"})


def links(count):
    opened, _ = meet([member(index, count) for index in range(count)])
    assert all(isinstance(each, link.Link) for each in opened), opened
    return opened


@pytest.mark.parametrize("count", [2, 3, 5, 64])
def test_all_are_there(count):
    assert {each.jax_address for each in links(count)} == {"jax:1"}


def test_missing_processes_are_named_by_all():
    errors, lines = meet([member(index, 8) for index in (0, 1, 2, 4, 5, 6)], limit_s=0.8)
    assert all(isinstance(error, PeerError) for error in errors)
    message = (
        "processes 3, 7 of 8 did not start within 1 s; there: processes 0-2, 4-6 (on a); start the same command with "
        "every JAX_PROCESS_ID from 0 to 7, or set JAX_NUM_PROCESSES to the number of processes"
    )
    assert {str(error) for error in errors} == {message}
    for each in lines:
        assert re.match(r"waiting for processes 3, 7 \(2 of 8 missing\), [01] s; there: processes 0-2, 4-6", each[-1])


def test_without_a_hub():
    lines = []
    with listen(0) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(PeerError, match=r"process 0 did not answer at 127\.0\.0\.1:\d+ within 0 s; start it"):
        open_link(f"127.0.0.1:{port}", member(1, 2), lines.append, limit_s=0.4)
    assert lines[0].startswith(f"waiting for process 0 at 127.0.0.1:{port}")


class Store:
    """JAX's key-value store, in which process 0 has said nothing yet."""

    def __init__(self, error="DEADLINE_EXCEEDED: GetKeyValue() timed out"):
        self.values, self.error = {}, error

    def key_value_set(self, key, value, allow_overwrite):
        self.values[key] = value

    def blocking_key_value_get(self, key, timeout_ms):
        if key not in self.values:
            time.sleep(timeout_ms / 1000)
            raise jax.errors.JaxRuntimeError(self.error)
        return self.values[key]


def test_processes_that_jax_has_connected(monkeypatch, capsys):
    """They wait for process 0, which says where the hub is, or why there is none; not for ever."""
    monkeypatch.setattr(start, "LINE_S", 0.1)
    monkeypatch.setattr(start, "START_LIMIT_S", 0.5)
    store = Store()
    with pytest.raises(PeerError, match=r"process 0 has begun no work that needs all processes within \d s; call the"):
        start._hub_address(store)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 2
    assert lines[0] == "waiting for process 0, which has begun no work that needs all processes yet, 0 s"
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"):
        start._hub_address(Store("UNAVAILABLE: connection is closed"))
    monkeypatch.setattr(start, "key_value_store", lambda: store)
    monkeypatch.setattr(jax, "process_count", lambda: 8192)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    with pytest.raises(ConfigError, match=r"^the host of process 0 allows a process to open 4096 files"):
        start._open_through_store()
    with pytest.raises(ConfigError, match=r"^process 0: the host of process 0 allows a process to open 4096 files"):
        start._hub_address(store)
    monkeypatch.setattr(start, "start_hub", lambda *_, has_service: "host:1")
    monkeypatch.setattr(start, "open_link", lambda address, *_: address)
    monkeypatch.setattr(start.atexit, "register", lambda _: None)
    assert start._open_through_store() == start._hub_address(store) == "host:1"


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            member(1, 3),
            "process 1 on a (pid 101) was started for 3 processes, and process 0 for 2; set JAX_NUM_PROCESSES",
        ),
        (member(1, 2, {"jax": "2"}), "jax is 1 in process 0 on a (pid 100) and 2 in process 1 on a (pid 101); start"),
        (member(1, 2, {"xla": "2"}), "jax is 1 in process 0 on a (pid 100) and None in process 1 on a (pid 101); xla"),
    ],
)
def test_what_differs_is_named_by_both(second, message):
    errors, _ = meet([member(0, 2), second], delays=(0, 0.2))
    assert all(isinstance(error, ConfigError) and str(error).startswith(message) for error in errors), errors


def test_flags_of_the_compiler_are_compared(monkeypatch):
    """Not their order, nor the folders of this host that it writes to."""
    facts = []
    for flags in ("--xla_a=1 --xla_b=2", "--xla_b=2 --xla_dump_to=/here --xla_a=1", "--xla_a=1"):
        monkeypatch.setenv("XLA_FLAGS", flags)
        facts.append(start._member(0, 2, {"key": "value"}).facts)
    assert facts[0] == facts[1] and {*facts[0].items()} - {*facts[2].items()} == {("XLA_FLAGS", "--xla_a=1 --xla_b=2")}


def test_one_id_twice():
    errors, _ = meet([member(0, 3), member(1, 3), member(1, 3, host="b")], delays=(0, 0, 0.3))
    message = "process 1 on a (pid 101) and process 1 on b (pid 101) have the same id; set JAX_PROCESS_ID to another"
    assert all(isinstance(error, ConfigError) and str(error).startswith(message) for error in errors), errors


def test_late_processes_learn_the_problem():
    """Process 2 comes when the others know already that process 1 is of another run."""
    errors, _ = meet([member(0, 4), member(1, 5), member(2, 4)], delays=(0, 0, 0.3))
    assert {str(error) for error in errors} == {str(errors[0])} and "was started for 5 processes" in str(errors[0])


def test_a_run_that_has_started_already():
    address, _ = serve(2)
    together(*(lambda i=i: open_link(address, member(i, 2), print) for i in range(2)))
    with pytest.raises(ConfigError, match=r"a run of 2 processes has started already, with process 1 on a \(pid 101\)"):
        open_link(address, member(1, 2), print)


def test_a_port_that_is_taken():
    message = r"process 0 cannot listen at port \d+ \(.*\): an earlier run is still there"
    with listen(0) as taken, pytest.raises(ConfigError, match=message):
        link.start_hub("localhost", taken.getsockname()[1], 2, has_service=False)


def test_a_port_of_another_program():
    """JAX's coordinator, for example, answers with a frame of HTTP/2."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00")
                connection.recv(100)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ConfigError, match="another program listens at the port of JAX_COORDINATOR_ADDRESS"):
            open_link(f"127.0.0.1:{server.getsockname()[1]}", member(1, 2), print, 5.0)


def test_a_hub_that_is_silent_while_processes_are_missing(monkeypatch):
    """As one on a host whose network is cut: the connection does not end, and nothing comes."""
    monkeypatch.setattr(link, "MEETING_SILENCE_S", 0.5)
    monkeypatch.setattr(hub, "LINE_INTERVAL_S", 0.2)
    address, _ = serve(2)
    lines = []

    def report(line):
        lines.append(line)
        if len(lines) == 5:
            monkeypatch.setattr(HubServer, "_send", lambda *_: None)

    message = "the hub of the run sent nothing for 0 s while processes were missing: the network to the host of process"
    with pytest.raises(PeerError, match=message):
        open_link(address, member(1, 2), report, SECONDS)
    assert len(lines) == 5


def test_a_process_that_ended_while_it_waited_may_come_again():
    """Other programs that connect, such as scanners of ports, change nothing."""
    address, _ = serve(2)
    port = int(address.rpartition(":")[2])
    for data in (encode(Kind.HELLO, **vars(member(1, 2))), b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b""):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(data)
            time.sleep(0.1)
    opened = together(*(lambda i=i: open_link(address, member(i, 2), print) for i in range(2)))
    assert all(isinstance(each, link.Link) for each in opened)


def work(each, act):
    """Do something as a part of the work of all processes; returns the problem."""
    try:
        with each.work():
            return act(each)
    except PeerError as error:
        return str(error).partition("; what this process was doing is in ")[0]


def wait(each):
    return each.wait_for(Kind.GATHER, "never")


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
    opened[2]._connection.sendall(encode(Kind.ENTER, is_end=False))
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
        r"process 1 is stuck while evaluating, without progress for \d s, at test_hub\.py:\d+ in \w+; "
        r"processes 0, 2 only wait for it; start the run again"
    )
    assert all(re.fullmatch(message, result) for result in results)


def ask(each, name="value"):
    each.send(Kind.GATHER, name=name, value=None)
    return each.wait_for(Kind.GATHER, name)["values"]


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
    monkeypatch.setattr(link, "SILENCE_S", 1.0)
    opened = links(2)
    monkeypatch.setattr(HubServer, "_read", lambda *_: time.sleep(0.1))
    started = time.monotonic()
    opened[1].send(Kind.GATHER, name="much", value="x" * 2**26)
    assert time.monotonic() - started < 5.0


def test_a_hub_that_is_silent(monkeypatch):
    """As one on a host whose network is cut; a hub that is there says so from time to time."""
    monkeypatch.setattr(link, "SILENCE_S", 0.5)
    monkeypatch.setattr(hub, "ALIVE_S", 0.2)
    opened = links(2)
    time.sleep(1.0)
    assert opened[1].problem is None
    monkeypatch.setattr(hub, "ALIVE_S", 99.0)
    assert work(opened[1], wait) == link.LOST_HUB


def test_the_hub_ends_with_the_last_process():
    address, thread = serve(2)
    opened = together(*(lambda i=i: open_link(address, member(i, 2), print) for i in range(2)))
    for each in opened:
        each._connection.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    assert not thread.is_alive()


def test_lines_arrive_in_pieces():
    lines = Lines()
    assert [*lines.add(b"ab")] == [] and next(lines.add(b"c\nd\ne")) == b"abc"
    assert [*lines.add(b"f\n")] == [b"d", b"ef"] and lines.unfinished == b""


def test_too_few_open_files(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    message = r"allows a process to open 4096 files, and the hub of 8192 processes needs 8256; raise the limit"
    with pytest.raises(ConfigError, match=message):
        link.start_hub("localhost", 0, 8192, has_service=False)


def test_a_process_that_takes_nothing(monkeypatch):
    """The others get their messages at once; it is lost after a while, and the hub goes on meanwhile."""
    monkeypatch.setattr("shardplan.runtime.processes.hub.hub_process.SEND_S", 0.5)
    monkeypatch.setattr(hub, "SILENCE_S", 30.0)
    address, _ = serve(3)
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as deaf:
        deaf.sendall(encode(Kind.HELLO, **vars(member(2, 3))))
        opened = together(*(lambda i=i: open_link(address, member(i, 3), print) for i in range(2)))
        deaf.sendall(encode(Kind.ENTER, is_end=False))
        for each in opened:
            each.send(Kind.ENTER, is_end=False)
        opened[1].send(Kind.BROADCAST, name="much")
        opened[0].send(Kind.BROADCAST, name="much", value="x" * 2**25)
        assert len(opened[1].wait_for(Kind.BROADCAST, "much")["value"]) == 2**25
        with pytest.raises(PeerError, match=r"process 2 on a \(pid 102\) of 3 was lost while starting"):
            opened[1].wait_for(Kind.GATHER, "never")

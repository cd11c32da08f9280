"""Processes meet before JAX connects them: all of them learn who is missing, or does not belong to the run."""

import json
import socket
import threading
import time

import pytest

from shardplan.errors import ConfigError, PeerError
from shardplan.runtime import roll_call
from shardplan.runtime.roll_call import Member, call_roll


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Lines and attempts follow each other faster."""
    monkeypatch.setattr(roll_call, "LINES_AT_S", (0.2, 0.4))
    monkeypatch.setattr(roll_call, "REMEDY_AFTER_S", 0.4)
    monkeypatch.setattr(roll_call, "RETRY_S", 0.05)
    monkeypatch.setattr(roll_call, "LATE_S", 0.5)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet(members, limit_s=10.0, delays=()):
    """The error of each process, or None, and the lines that it reports."""
    address = f"127.0.0.1:{free_port()}"
    errors, lines = [None] * len(members), [[] for _ in members]

    def run(i):
        time.sleep(delays[i] if delays else 0)
        try:
            call_roll(address, members[i], lines[i].append, limit_s)
        except Exception as error:
            errors[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return errors, lines


def member(index, count, facts=None, host="a"):
    return Member(index, count, facts or {"jax": "1"}, host, 100 + index)


@pytest.mark.parametrize("count", [2, 3, 5, 64])
def test_all_are_there(count):
    errors, _ = meet([member(index, count) for index in range(count)])
    assert errors == [None] * count


def test_process_0_may_come_last():
    errors, lines = meet([member(0, 3), member(1, 3), member(2, 3)], delays=(0.5, 0, 0))
    assert errors == [None] * 3
    assert lines[1][0].startswith("waiting for process 0 at 127.0.0.1:")


def test_missing_processes_are_named_by_all():
    errors, lines = meet([member(index, 8) for index in (0, 1, 2, 4, 5, 6)], limit_s=0.8)
    assert all(isinstance(error, PeerError) for error in errors)
    message = (
        "processes 3, 7 of 8 did not start within 1 s; there: processes 0-2, 4-6 (on a); start the same command with "
        "every JAX_PROCESS_ID from 0 to 7, or set JAX_NUM_PROCESSES to the number of processes"
    )
    assert {str(error) for error in errors} == {message}
    for each in lines:
        assert each[0] == "waiting for processes 3, 7 (2 of 8 missing), 0 s"
        assert "there: processes 0-2, 4-6" in each[1]


def test_without_process_0():
    errors, lines = meet([member(1, 2)], limit_s=0.5)
    assert isinstance(errors[0], PeerError) and "process 0 did not answer at 127.0.0.1:" in str(errors[0])
    assert lines[0][0].startswith("waiting for process 0")


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (member(1, 3), "process 1 on a (pid 101) was started for 3 processes, and process 0 on a (pid 100) for 2; set"),
        (member(1, 2, {"jax": "2"}), "jax is 1 in process 0 on a (pid 100) and 2 in process 1 on a (pid 101); start"),
        (
            member(1, 2, {"xla": "2"}),
            "jax is 1 in process 0 on a (pid 100) and None in process 1 on a (pid 101); xla is",
        ),
    ],
)
def test_what_differs_is_named_by_both(second, message):
    errors, _ = meet([member(0, 2), second])
    assert all(isinstance(error, ConfigError) and str(error).startswith(message) for error in errors), errors


def test_one_id_twice():
    errors, _ = meet([member(0, 3), member(1, 3), member(1, 3, host="b")], delays=(0, 0, 0.3))
    message = "process 1 on a (pid 101) and process 1 on b (pid 101) have the same id; set JAX_PROCESS_ID to another"
    assert all(isinstance(error, ConfigError) and str(error).startswith(message) for error in errors), errors


def test_late_processes_learn_the_problem():
    """Process 2 comes when the others know already that process 1 is of another run."""
    errors, _ = meet([member(0, 4), member(1, 5), member(2, 4)], delays=(0, 0, 0.3))
    assert {str(error) for error in errors} == {str(errors[0])} and "was started for 5 processes" in str(errors[0])


def test_a_port_that_is_taken():
    message = r"process 0 cannot listen at port \d+ \(.*\): an earlier run is still there"
    with socket.create_server(("", 0)) as taken, pytest.raises(ConfigError, match=message):
        call_roll(f"127.0.0.1:{taken.getsockname()[1]}", member(0, 2), print, 1.0)


def test_a_run_that_has_started_already():
    """JAX's coordinator answers with a frame of HTTP/2."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00")
                connection.recv(100)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(
            ConfigError, match="a run has started already at the port of JAX_COORDINATOR_ADDRESS, without"
        ):
            call_roll(f"127.0.0.1:{server.getsockname()[1]}", member(1, 2), print, 5.0)


def test_a_process_that_ended_while_it_waited_may_come_again():
    """Other programs that connect, such as scanners of ports, change nothing."""
    port, errors = free_port(), []

    def run(each):
        try:
            call_roll(f"127.0.0.1:{port}", each, lambda _: None, 10.0)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(member(0, 3),))]
    threads[0].start()
    time.sleep(0.2)
    hello = json.dumps({"protocol": roll_call.PROTOCOL, **vars(member(1, 3))}).encode() + b"\n"
    for data in (hello, b"GET / HTTP/1.1\r\n\r\n", b""):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(data)
            time.sleep(0.2)
    threads += [threading.Thread(target=run, args=(member(index, 3),)) for index in (1, 2)]
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors

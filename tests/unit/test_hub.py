"""Processes meet at their hub before JAX connects them: all of them learn who is missing, or does not belong there."""

import dataclasses
import re
import resource
import socket
import threading
import time

import jax
import pytest
from hub_runs import QUICK, SECONDS, links, meet, member, serve, together

from shardplan.errors import ConfigError, PeerError
from shardplan.runtime.processes import link, start
from shardplan.runtime.processes.hub.hub_process import HubServer
from shardplan.runtime.processes.hub.messages import Lines, MessageKind, encode, listen
from shardplan.runtime.processes.link import open_link
from shardplan.runtime.processes.timing import ProcessTiming

pytestmark = pytest.mark.usefixtures("own_hub")


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
        open_link(f"127.0.0.1:{port}", member(1, 2), lines.append, 0.4, QUICK)
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


def test_processes_that_jax_has_connected(monkeypatch, capsys, raises_message):
    """They wait for process 0, which says where the hub is, or why there is none; not for ever."""
    store, timing = Store(), ProcessTiming(no_hub_line_s=0.1, start_limit_s=0.5)
    with pytest.raises(PeerError, match=r"process 0 has begun no work that needs all processes within \d s; call the"):
        start._hub_address(store, timing)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 2
    assert lines[0] == "waiting for process 0, which has begun no work that needs all processes yet, 0 s"
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"):
        start._hub_address(Store("UNAVAILABLE: connection is closed"), timing)
    monkeypatch.setattr(start, "key_value_store", lambda: store)
    monkeypatch.setattr(jax, "process_count", lambda: 8192)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    with raises_message(ConfigError):
        start._open_through_store()
    with raises_message(ConfigError):
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


def test_a_run_that_has_started_already(raises_message):
    address, _ = serve(2)
    together(*(lambda i=i: open_link(address, member(i, 2), print, timing=QUICK) for i in range(2)))
    with raises_message(ConfigError):
        open_link(address, member(1, 2), print, timing=QUICK)


def test_a_port_that_is_taken():
    message = r"process 0 cannot listen at port \d+ \(.*\): an earlier run is still there"
    with listen(0) as taken, pytest.raises(ConfigError, match=message):
        link.start_hub("localhost", taken.getsockname()[1], 2, has_service=False)


def test_a_port_of_another_program(raises_message):
    """JAX's coordinator, for example, answers with a frame of HTTP/2."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00")
                connection.recv(100)

        threading.Thread(target=answer, daemon=True).start()
        with raises_message(ConfigError):
            open_link(f"127.0.0.1:{server.getsockname()[1]}", member(1, 2), print, 5.0, QUICK)


def test_a_hub_that_is_silent_while_processes_are_missing(monkeypatch, raises_message):
    """As one on a host whose network is cut: the connection does not end, and nothing comes."""
    timing = dataclasses.replace(QUICK, line_interval_s=0.2, hub_silence_s=0.3)
    address, _ = serve(2, timing=timing)
    lines = []

    def report(line):
        lines.append(line)
        if len(lines) == 5:
            monkeypatch.setattr(HubServer, "_send", lambda *_: None)

    with raises_message(PeerError):
        open_link(address, member(1, 2), report, SECONDS, timing)
    assert len(lines) == 5


def test_a_process_that_ended_while_it_waited_may_come_again():
    """Other programs that connect, such as scanners of ports, change nothing."""
    address, _ = serve(2)
    port = int(address.rpartition(":")[2])
    for data in (encode(MessageKind.HELLO, **vars(member(1, 2))), b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b""):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(data)
            time.sleep(0.1)
    opened = together(*(lambda i=i: open_link(address, member(i, 2), print, timing=QUICK) for i in range(2)))
    assert all(isinstance(each, link.Link) for each in opened)


def test_the_hub_ends_with_the_last_process():
    address, thread = serve(2)
    opened = together(*(lambda i=i: open_link(address, member(i, 2), print, timing=QUICK) for i in range(2)))
    for each in opened:
        each._connection.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    assert not thread.is_alive()


def test_lines_arrive_in_pieces():
    lines = Lines()
    assert [*lines.add(b"ab")] == [] and next(lines.add(b"c\nd\ne")) == b"abc"
    assert [*lines.add(b"f\n")] == [b"d", b"ef"] and lines.unfinished == b""


def test_too_few_open_files(monkeypatch, raises_message):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    with raises_message(ConfigError):
        link.start_hub("localhost", 0, 8192, has_service=False)

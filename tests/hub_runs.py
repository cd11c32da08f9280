"""Runs of threads, each with a link to one hub as a process has, for tests of both."""

import threading
import time

from shardplan.errors import PeerError
from shardplan.runtime.processes import link
from shardplan.runtime.processes.hub.hub import Hub, Member
from shardplan.runtime.processes.hub.hub_process import HubServer
from shardplan.runtime.processes.hub.messages import MessageKind, listen
from shardplan.runtime.processes.link import open_link
from shardplan.runtime.processes.timing import ProcessTiming

SECONDS = 10.0
QUICK = ProcessTiming(
    lines_at_s=(0.2, 0.4),
    remedy_after_s=0.3,
    late_s=2.0,
    retry_s=0.05,
    no_hub_line_s=0.2,
    beat_s=0.1,
    silence_s=1.0,
    locate_s=1.0,
    tick_s=0.05,
)
"""Lines, attempts and signs of life follow each other faster; the hub may be silent as long as in real runs."""


def serve(count, limit_s=SECONDS, timing=QUICK):
    """Start a hub, and return its address and thread."""
    listener = listen(0)
    server = HubServer(listener, Hub(count, limit_s, time.monotonic(), lambda: "jax:1", timing))
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


def meet(members, limit_s=SECONDS, delays=(), count=None, timing=QUICK):
    """The link or the error of each process, and the lines that it reports."""
    address, _ = serve(count or members[0].count, limit_s, timing)
    lines = [[] for _ in members]

    def come(i):
        time.sleep(delays[i] if delays else 0)
        return open_link(address, members[i], lines[i].append, limit_s, timing)

    return together(*(lambda i=i: come(i) for i in range(len(members)))), lines


def member(index, count, facts=None, host="a"):
    return Member(index, count, host, 100 + index, facts or {"jax": "1"})


def links(count, timing=QUICK):
    opened, _ = meet([member(index, count) for index in range(count)], timing=timing)
    assert all(isinstance(each, link.Link) for each in opened), opened
    return opened


def work(each, act):
    """Do something as a part of the work of all processes; returns the problem."""
    try:
        with each.work():
            return act(each)
    except PeerError as error:
        return str(error).partition("; what this process was doing is in ")[0]


def wait(each):
    return each.wait_for(MessageKind.GATHER, "never")


def ask(each, name="value"):
    each.send(MessageKind.GATHER, name=name, value=None)
    return each.wait_for(MessageKind.GATHER, name)["values"]

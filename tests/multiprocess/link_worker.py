"""Run one of many processes that meet at a hub, without JAX: python link_worker.py ADDRESS INDEX COUNT.

Prints what it received in each kind of exchange, as JSON.
"""

import json
import os
import sys
import time

from shardplan.runtime.processes.hub.hub import Member
from shardplan.runtime.processes.hub.messages import MessageKind, host_and_port
from shardplan.runtime.processes.link import open_link, start_hub
from shardplan.runtime.processes.timing import TIMING


def main(address: str, index: int, count: int) -> None:
    if index == 0:
        start_hub(*host_and_port(address), count, has_service=False)
    link = open_link(address, Member(index, count, "host", os.getpid(), {}), print)
    with link.work():

        def ask(kind: MessageKind, name: str, **values: object) -> dict[str, object]:
            link.send(kind, name=name, **values)
            answer = link.wait_for(kind, name)
            return {key: value for key, value in answer.items() if key not in ("kind", "name")}

        received = [
            ask(MessageKind.AGREE, "agree", parts={"x": "1"}, problem=None),
            ask(MessageKind.GATHER, "gather", value=index),
            ask(MessageKind.MAXIMUM, "maximum", value=index * 37 % count),
            ask(MessageKind.EXCHANGE, "exchange", values={str((index + 1) % count): index}),
        ]
        if index == 0:
            link.send(MessageKind.BROADCAST, name="broadcast", value="x" * 10**6)
        else:
            received.append({"length": len(str(ask(MessageKind.BROADCAST, "broadcast")["value"]))})
        time.sleep(1.5 * TIMING.beat_s)
        received.append(ask(MessageKind.AGREE, "end", parts={}, problem=None))
    print(json.dumps(received))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

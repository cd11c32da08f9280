"""Many real processes meet at the hub of their run, exchange values, show that they are alive, and end."""

import json
from pathlib import Path

from processes import fork_python
from test_eval import free_port

WORKER = Path(__file__).with_name("link_worker.py")
COUNT = 64


def test_many_processes():
    address = f"127.0.0.1:{free_port()}"
    processes = [fork_python([WORKER, address, index, COUNT]) for index in range(COUNT)]
    results = [process.communicate(timeout=120) for process in processes]
    for index, (process, (output, error)) in enumerate(zip(processes, results, strict=True)):
        assert process.returncode == 0, error
        sent = [{"length": 10**6}] if index else []
        assert json.loads(output.splitlines()[-1]) == [
            {}, {"values": [*range(COUNT)]}, {"value": COUNT - 1},
            {"values": {str((index - 1) % COUNT): (index - 1) % COUNT}}, *sent, {},
        ]  # fmt: skip

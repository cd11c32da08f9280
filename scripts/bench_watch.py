"""What watching a run costs: the part of a step's time that its watch and its heartbeats take.

    python scripts/bench_watch.py --output docs/benchmarks/watch.md

Two processes do steps of 100 ms, as a program that only computes would. Measured are the time that the main thread
spends on saying how far it is, and the processor time of all other threads, which would be taken from
steps only if no processor were free. Each is given as a part of the time of the steps.
"""

import multiprocessing
import os
import sys
import tempfile
import time

from bench_page import page_parser, write_page
from fault_runs import free_port

STEP_S = 0.1


def work(
    index: int, address: str, seconds: float, folder: str, results: "multiprocessing.Queue[tuple[float, float, float]]"
):
    """Do steps, and put the parts of their time that the main thread and other threads took, and the steps."""
    os.environ |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(index)}
    from shardplan.monitoring.heartbeat import write_heartbeats
    from shardplan.monitoring.records import RunRecords
    from shardplan.runtime.devices import start_devices
    from shardplan.runtime.processes.group import open_process_group
    from shardplan.runtime.processes.watch.frozen import end_if_frozen

    start_devices("cpu-2", 2, True)
    records = RunRecords(folder, index)
    with (
        end_if_frozen(),
        open_process_group() as processes,
        write_heartbeats(processes.watch, records),
        processes.phase("evaluating", 300.0) as advance,
    ):
        processes.gather("start", None)
        started, others, saying, steps = time.perf_counter(), time.process_time() - time.thread_time(), 0.0, 0
        while time.perf_counter() - started < seconds:
            end = time.perf_counter() + STEP_S
            while time.perf_counter() < end:
                pass
            before = time.perf_counter()
            advance(steps, f"step {steps}")
            saying += time.perf_counter() - before
            steps += 1
        others = time.process_time() - time.thread_time() - others
        processes.gather("end", None)
    results.put((saying / (steps * STEP_S), others / (steps * STEP_S), steps))


def main() -> None:
    """Measure, and print a table."""
    parser = page_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results, address = context.Queue(), f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=work, args=(i, address, given.seconds, folder, results)) for i in range(2)]
        for process in processes:
            process.start()
        rows = [results.get() for _ in processes]
        for process in processes:
            process.join()
    saying, others = (max(row[i] for row in rows) for i in range(2))
    text = f"""# What watching costs

`python scripts/bench_watch.py --output docs/benchmarks/watch.md`: two processes, {rows[0][2]} steps of 100 ms each; the
larger of both processes, as a part of the time of the steps.

| part | of the time of steps |
|---|---|
| the main thread says how far it is | {saying:.4%} |
| processor time of the threads that watch, send signs of life and write heartbeats | {others:.4%} |
| together (target: 0.5%) | {saying + others:.4%} |
"""
    write_page(text, given.output)
    sys.exit(saying + others > 0.005)


if __name__ == "__main__":
    main()

"""Judges of gates: each says what the records of runs have, and whether that passes.

Everything is computed from `bench_nsa_run.py`'s records, which are made of the files that runs leave behind.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from shardplan.hardware import GIB

Records = Mapping[str, Any]
Judgement = tuple[str, bool]
"""What the runs did, and whether that passes."""
MIN_TOKENS_PER_SECOND, MAX_GIB = 50.0, 30.0
"""Gates of the reports: tokens/s of all devices, and GiB of a device."""
REPORTED = {"k_mean": 752.5, "k_max": 1024, "pct_at_max": 0.0083, "rows": 49152}
"""The selection of a run of their model, for one sequence of 2048 tokens; pct_at_max has 4 decimals."""
MAX_RATIO = 1.3
"""Largest ratio of the times of a step on several devices and on one."""
SHARDED, UNSHARDED = "sparse-fsdp-8", "sparse-1"
"""Programs whose ratio that is: the same work on 8 devices and on one."""
MAX_DIFFERENCE = 1e-5
"""Largest relative difference of losses that differ by the order of float32 sums alone: in one step by 1e-7, and Adam
divides gradients by their size, so that differences grow over the steps."""
STAGES = ("started", "loaded", "compiled", "first step")
BRANCHES = ("cmp", "slc", "win")
STUCK, TOO_SLOW, REFUSED = 5, 7, (2, 3)
"""Exit codes of `shardplan train`; of a launch that is refused, the arguments are bad, or no plan is feasible."""


def trainings(records: Records) -> dict[str, Any]:
    """The runs that train to their end, without a fault."""
    found = {}
    for name, each in records.items():
        if "run" in each and not each["run"]["stalls_after"] and not _factor(each):
            found[name] = each
    return found


def storage(record: Records) -> str:
    """How a plan stores parameters."""
    if record["run"]["devices"] == 1:
        return "one device"
    return "FSDP" if record["plan"]["param_mapping"] else "DDP"


def tokens_per_second(record: Records) -> float:
    """Tokens of a batch by the median time of a step, without the first."""
    return float(record["run"]["batch"] * record["run"]["position"] / statistics.median(record["step_seconds"]))


def message_of(record: Records) -> str:
    """The line with which a run ended, without the name of the command."""
    line: str = record["line"]
    return line.partition(": ")[2]


def step_ratio(steps: Records, one: str, other: str) -> float:
    """Ratio of the processor times of two programs, medians over the rounds."""
    return processor_seconds(steps, one) / processor_seconds(steps, other)


def processor_seconds(steps: Records, program: str) -> float:
    """Processor time of a step, median over the rounds."""
    return float(statistics.median(steps["programs"][program]["processor"]))


def judge_stability(runs: Records) -> Judgement:
    ended = [name for name, each in runs.items() if not any(code for codes in each["codes"] for code in codes)]
    complete = [name for name in ended if len(runs[name]["losses"]) == runs[name]["run"]["steps"]]
    steps = sum(len(each["losses"]) for each in runs.values())
    kinds = sorted({f"{storage(each)} with {each['plan']['checkpointing']}" for each in runs.values()})
    return (
        f"{len(complete)} of {len(runs)} runs ended with exit code 0 and all steps, {steps} in all; {', '.join(kinds)}",
        len(complete) == len(runs),
    )


def judge_memory(runs: Records) -> Judgement:
    arrays = max(each["memory"]["first step"]["arrays"] for each in runs.values()) / GIB
    host = {name: each["memory"]["first step"]["host"] / GIB for name, each in runs.items()}
    most = max(host, key=lambda name: host[name])
    count = len(runs[most]["processes"])
    return (
        f"at most {arrays:.2f} GiB of arrays a device; at most {host[most]:.1f} GiB for a whole process with its "
        f"{runs[most]['run']['devices'] // count} devices (`{most}`)",
        host[most] < MAX_GIB,
    )


def judge_throughput(record: Records, steps: Records) -> Judgement:
    rate, programs = tokens_per_second(record), steps["programs"]
    seconds = {name: processor_seconds(steps, name) for name in programs}
    tokens = steps["batch"] * steps["position"]
    return (
        f"{rate:.1f} tokens/s on CPU cores that other work shares; {tokens / seconds['sparse-1']:.1f} for a second of "
        f"processor time, where attention to all tokens has {tokens / seconds['dense-1']:.1f}",
        rate > MIN_TOKENS_PER_SECOND,
    )


def judge_too_slow(record: Records) -> Judgement:
    codes = [code for codes in record["codes"] for code in codes]
    return (
        f"a run that must be {_factor(record)} times as fast as its plan ends after {len(record['losses'])} steps with "
        f"exit code {codes[0]}: `{message_of(record)}`",
        codes == [TOO_SLOW] and "tokens/s" in record["line"],
    )


def _factor(record: Records) -> str:
    """The `gate.factor` of a run; empty if it has none."""
    given = [each.partition("=")[2] for each in record["run"]["arguments"] if each.startswith("--gate.factor")]
    return given[0] if given else ""


def judge_routing(runs: Records) -> Judgement:
    planned = {each["plan"]["method"] for each in runs.values()}
    lines = [line for each in runs.values() for line in each["audit"]["methods"]]
    good = sum(line.endswith("as planned") for line in lines)
    return (
        f"{good} of {len(lines)} lines of audit.txt and run.json: the selected branch by {', '.join(sorted(planned))}, "
        "as planned",
        bool(lines) and good == len(lines) and len(lines) >= len(runs),
    )


def judge_health(runs: Records) -> Judgement:
    figures = [each["figures"] for each in runs.values()]
    means = [each[f"gate_mean_{branch}"] for each in figures for branch in BRANCHES]
    entropies = [each[f"gate_entropy_{branch}"] for each in figures for branch in BRANCHES]
    return (
        f"means {min(means):.2f} to {max(means):.2f}, entropies {min(entropies):.2f} to {max(entropies):.2f} nats, of "
        f"all branches of {len(figures)} runs",
        min(entropies) > 0.05 and min(means) > 0.01 and max(means) < 0.99,
    )


def judge_selection(record: Records) -> Judgement:
    figures = record["figures"]
    equal = all(round(figures[name], 4) == value for name, value in REPORTED.items())
    return ", ".join(f"{name} {figures[name]:.6g}" for name in REPORTED), equal


def judge_closed_form(runs: Records) -> Judgement:
    exact = [
        name for name, each in runs.items()
        if all(each["figures"][key] == value for key, value in each["closed_form"].items())
    ]  # fmt: skip
    groups = {name: each["run"]["changes"].get("num_key_value_heads", 2) for name, each in runs.items()}
    rows = [name for name, each in runs.items() if each["figures"]["rows"] == _rows(each["run"], groups[name])]
    return (
        f"k_mean, k_max and pct_at_max equal to the closed form in {len(exact)} of {len(runs)} runs; every row counted "
        f"once in {len(rows)}",
        len(exact) == len(rows) == len(runs),
    )


def _rows(run: Records, groups: int) -> int:
    """Layers x sequences x positions x groups."""
    return int(run["changes"].get("num_hidden_layers", 12) * run["batch"] * run["position"] * groups)


def judge_fallbacks(runs: Records) -> Judgement:
    other = []
    for name, each in runs.items():
        if set(each["selected_methods"]) != {each["plan"]["method"]}:
            other.append(name)
    layers = sum(len(numbers) for each in runs.values() for numbers in each["selected_methods"].values())
    return f"{len(other)} runs with a layer by another method than planned, of {layers} layers counted", not other


def judge_host(steps: Records) -> Judgement:
    counts = [each["host_operations"] for each in steps["programs"].values()]
    return f"{sum(counts)} callbacks, infeeds and outfeeds in {len(counts)} compiled steps", sum(counts) == 0


def judge_types(runs: Records) -> Judgement:
    types = sorted({each for run in runs.values() for each in run["audit"]["types"]})
    arrays = sum(run["audit"]["arrays"] - len(run["audit"]["methods"]) for run in runs.values())
    return f"{arrays} parameters of {len(runs)} runs as planned, all {', '.join(types)}", types == ["float32"]


def judge_snapshots(runs: Records) -> Judgement:
    complete = [each for each in runs.values() if tuple(sorted(each["memory"])) == tuple(sorted(STAGES))]
    return f"{', '.join(STAGES)}: in {len(complete)} of {len(runs)} runs", len(complete) == len(runs)


def judge_optimizer(record: Records) -> Judgement:
    parts = record["plan"]["memory"]
    planned, measured = (parts["parameters"] + parts["optimizer"]) / 2**20, record["memory"]["loaded"]["arrays"] / 2**20
    return (
        f"planned {parts['optimizer'] / 2**20:.0f} MiB a device; parameters and this, {planned:.0f} MiB planned, "
        f"{measured:.0f} MiB measured",
        abs(measured / planned - 1) < 0.01,
    )


def judge_heartbeats(runs: Records) -> Judgement:
    beats = [each["heartbeats"] for each in runs.values()]
    lines, with_statistics = (sum(each[name] for each in beats) for name in ("lines", "with_statistics"))
    return (
        f"{lines} lines of {len(runs)} runs, {with_statistics} with statistics of the selection",
        all(each["with_statistics"] for each in beats),
    )


def judge_stall(record: Records) -> Judgement:
    code = record["codes"][0][0]
    return (
        f"of two processes one is stopped in training: the other ends {record['seconds_to_end']:.0f} s later with exit "
        f"code {code}, leaves {', '.join(record['stacks']) or 'no stacks'}, and says `{message_of(record)}`",
        code == STUCK and bool(record["stacks"]) and "process 1" in record["line"],
    )


def judge_guardrails(record: Records) -> Judgement:
    launches = record["launches"]
    good = []
    for name, each in launches.items():
        if each["code"] in REFUSED and each["line"] and not each["is_loaded"]:
            good.append(name)
    return (
        f"{len(good)} of {len(launches)} launches that cannot work end with exit code 2 or 3 and one line, before "
        f"anything is loaded: {', '.join(launches)}",
        len(good) == len(launches),
    )


def judge_environment(runs: Records) -> Judgement:
    complete = [name for name, each in runs.items() if len(each["processes"]) == each["run"]["processes"]]
    return f"env.json with all processes in {len(complete)} of {len(runs)} runs", len(complete) == len(runs)


def judge_learning(record: Records) -> Judgement:
    losses = record["losses"]
    return (
        f"{losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} steps of {record['run']['batch']} x "
        f"{record['run']['position']} tokens; 500 were not run",
        len(losses) >= 50 and statistics.fmean(losses[-5:]) < losses[0] - 1.0,
    )


def judge_plans(first: Records, *others: Records) -> Judgement:
    texts, differences = [], []
    for each in others:
        pairs = zip(each["losses"], first["losses"], strict=False)  # the others have fewer steps
        differences.append(max(abs(one / other - 1) for one, other in pairs))
        kind = f"{storage(each)} with {each['plan']['checkpointing']}, {each['run']['processes']} processes"
        texts.append(f"{kind}: {differences[-1]:.0e}")
    return f"largest relative difference to the losses of `fsdp`: {'; '.join(texts)}", max(differences) < MAX_DIFFERENCE


def judge_resumption(resumed: Records, straight: Records) -> Judgement:
    count, after = resumed["run"]["steps"], resumed["run"]["restarts_after"]
    equal = resumed["losses"] == straight["losses"][:count] and resumed["codes"] == [[0], [0]]
    return (
        f"stopped after step {after}, started again: {count} losses equal to the bit: {'yes' if equal else 'no'}",
        equal,
    )


def judge_positions(steps: Records) -> Judgement:
    one, four = (steps["programs"][name]["losses"] for name in ("sparse-1", "sparse-positions-4"))
    largest = max(abs(first / second - 1) for first, second in zip(one, four, strict=True))
    text = (
        f"{len(one)} steps of {steps['batch']} x {steps['position']} tokens: largest relative difference {largest:.0e}"
    )
    return text, largest < MAX_DIFFERENCE


def judge_scaling(steps: Records, *shorter: Records) -> Judgement:
    """Judge the sequences that the model is made for; shorter ones are named beside them."""
    texts = []
    for each in (steps, *shorter):
        ratio = step_ratio(each, SHARDED, UNSHARDED)
        added = processor_seconds(each, SHARDED) - processor_seconds(each, UNSHARDED)
        texts.append(f"{ratio:.2f} with {each['batch']} x {each['position']} tokens ({added:+.1f} s)")
    eight, one = (min(steps["programs"][name]["wall"]) for name in (SHARDED, UNSHARDED))
    text = f"processor time: {texts[0]}, {eight / one:.2f} by the clock; shorter sequences {', '.join(texts[1:])}"
    return text, step_ratio(steps, SHARDED, UNSHARDED) <= MAX_RATIO

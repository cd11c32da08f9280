"""Bad input of verify ends with one line and exit code 2, no verdict with code 6; nothing is compiled."""

import json
import re
import sys
import time

import pytest
from conftest import fails, run

from shardplan.runtime import progress
from shardplan.verify.compiler.run_worker import CompileStopped
from shardplan.verify.verdict import CompilerCrash, MemoryLimit, TimeLimit

CONFIG = "--config=configs/8b.yaml"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([CONFIG, "--hardware.slice=cpu-8"], "hardware.slice cpu-8 has no TPU compiler; plan for a TPU slice"),
        ([CONFIG, "--against", "missing.yaml"], "against: missing.yaml cannot be read: No such file"),
        ([CONFIG, "--against"], "--against: expected at least one argument"),
        ([CONFIG, "--plan", "missing.json"], "plan missing.json cannot be read"),
        ([CONFIG, "--options", "both"], "options is 'both'; valid: auto, plan"),
        ([CONFIG, "--compiler.program", "steps"], "compiler.program is 'steps'; did you mean 'step'?"),
        ([CONFIG, "--compiler.seconds", "0"], "compiler.seconds is 0; it must be at least 1"),
        ([CONFIG, "--compiler.gib", ".nan"], "compiler.gib is nan; it must be at least"),
        ([CONFIG, "--workload.kind", "training"], "workload.kind is 'training'; did you mean 'train'?"),
        (
            [CONFIG, "--hardware.slice=2xv4-8", "--mesh.model=8"],
            "mesh.model 8: with replica x data = 1, mesh axis model would span several of the 2 slices of 2xv4-8",
        ),
    ],
)
def test_bad_input(arguments, message):
    fails(run("verify", *arguments), 2, message)


def test_against_other_files(tmp_path):
    (tmp_path / "list.yaml").write_text("[1, 2]")
    fails(run("verify", CONFIG, "--against", tmp_path / "list.yaml"), 2, "contains a list, not a configuration")
    (tmp_path / "broken.json").write_text("{")
    fails(run("verify", CONFIG, "--against", tmp_path / "broken.json"), 2, "is neither YAML nor JSON")
    (tmp_path / "levanter.yaml").write_text(json.dumps({"trainer": {"mesh": {"axes": {"model": 48}}}}))
    fails(
        run("verify", CONFIG, "--hardware.slice=v4-256", "--against", tmp_path / "levanter.yaml"),
        2,
        "trainer.mesh.axes.model 48 does not divide the 128 devices",
    )


@pytest.mark.parametrize("arguments", [("--options", "auto"), ("--against", "other.yaml")])
def test_other_commands_verify_the_plan_without_options_and_comparisons(arguments):
    name = arguments[0].removeprefix("--")
    done = run("plan", CONFIG, "--hardware.slice=v5p-16", "--verify", *arguments, "--json=-")
    assert done.returncode == 2
    assert f"{name} is a key of verify, not of plan; leave it out" in done.stderr


def test_eval_refuses_a_plan_for_training(checkpoint, tmp_path):
    arguments = [f"--model.ref={checkpoint}", f"--data.path={checkpoint / 'text.jsonl'}", f"--output={tmp_path / 'r'}"]
    fails(run("eval", *arguments, "--workload.kind=train"), 2, "workload.kind is train; eval runs plans for evaluation")


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (TimeLimit(60), "not compiled in 60 s; raise compiler.seconds"),
        (MemoryLimit(4.0), "compiling took more than 4 GiB of this machine; raise compiler.gib"),
        (CompilerCrash(-11, "Fatal"), "the compiler crashed (SIGSEGV): Fatal"),
        (CompilerCrash(-15, ""), "the compiler was ended by SIGTERM from outside; start the command again"),
    ],
)
def test_no_verdict_is_not_that_nothing_fits(monkeypatch, reason, text):
    """Exit code 6, and the remedy; what is compiled is on stderr meanwhile."""

    def stop(*_):
        end = time.monotonic() + 10
        while "compiling" not in sys.stderr.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
        raise CompileStopped(reason)

    for name in ("FIRST_LINE_S", "LINE_INTERVAL_S"):
        monkeypatch.setattr(progress, name, 0.01)
    monkeypatch.setattr("shardplan.verify.run.compile_case", stop)
    done = run("verify", CONFIG, "--compiler.cache=null")
    assert done.returncode == 6, done.stderr
    assert done.stderr.splitlines()[-1] == f"shardplan verify: v5e-8: eval undecided: {text}"
    line = r"verify: 0 of 1 verdicts; compiling this plan; a compile usually takes 1 to 4 minutes \(\d+ s\)"
    assert any(re.fullmatch(line, each) for each in done.stderr.splitlines())
    assert "undecided" in done.stdout

"""`shardplan launch`: the scripts run with stand-ins for the launchers, and start a run with its arguments."""

import ast
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, fails, run

from shardplan.config.sections import Target
from shardplan.plan.plan import Plan

STAND_IN = Path(__file__).parent / "launchers" / "stand_in.py"
AWKWARD = 'it\'s a $HOME `x` "q" \\ & näme'
"""Text that needs quotes everywhere."""
UNPRINTABLE = "a=b\tc\nd\u2028e\x07"
CONFIG = f"""\
# $HOME `x` "q" 'q' \\ {{{{ braces }}}}
model: {{ref: gs://bucket/model}}
data: {{path: {json.dumps(AWKWARD)}}}
tracker: {{project: "lines that could end
END_OF_FILE
END_OF_HOST_SCRIPT
what contains them"}}"""
CLOUD = ("--launch.zone=us-east5-b", "--launch.cluster=c", "--launch.image=i")
SLICES = {Target.SLURM: "cpu-8", Target.RAY: "cpu-8"}
"""Target -> what it starts in these tests; the others start v5e-16."""


class StandIns:
    """Programs on PATH that record their arguments."""

    def __init__(self, folder: Path):
        self.folder, self.bin, self.records = folder, folder / "bin", folder / "records"
        self.bin.mkdir()
        for name in ("python", "gcloud", "xpk", "srun", "sleep"):
            (self.bin / name).write_text(f"#!{sys.executable}\n{STAND_IN.read_text()}")
            (self.bin / name).chmod(0o755)

    def run(self, target: str, script: str, **environment: str) -> subprocess.CompletedProcess:
        """Start a script as the launcher does; its records are then those of this run."""
        self.records.write_text("")
        return subprocess.run(
            ["bash", "-c", _shell_of(target, script)],
            cwd=self.folder,
            capture_output=True,
            text=True,
            env={
                **os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", "STAND_IN_RECORDS": str(self.records),
                "SLURM_JOB_NAME": "job", "SLURM_JOB_ID": "7", **environment,
            },
        )  # fmt: skip

    def calls(self, program: str) -> list[dict]:
        """What a program was called with."""
        records = map(json.loads, self.records.read_text().splitlines())
        return [record for record in records if record["program"] == program]


def _shell_of(target: str, script: str) -> str:
    """The shell script that a launcher runs on each host, of those that have no command line."""
    match target:
        case Target.SKYPILOT:
            return yaml.safe_load(script)["run"]
        case Target.RAY:
            values = {node.targets[0].id: node.value for node in ast.parse(script).body if isinstance(node, ast.Assign)}
            return ast.literal_eval(values["HOST_SCRIPT"])
    return script


@pytest.fixture
def stand_ins(tmp_path) -> StandIns:
    return StandIns(tmp_path)


@pytest.fixture
def config(tmp_path) -> Path:
    """A configuration whose name and content need quotes, without a line break at its end."""
    path = tmp_path / AWKWARD / f"{AWKWARD}.yaml"
    path.parent.mkdir()
    path.write_text(CONFIG)
    return path


def launch(target: str, *arguments: str, command: tuple[str, ...] = ("launch",)) -> str:
    done = run(*command, "--to", target, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("target", Target)
def test_a_script_starts_the_evaluation(target, config, stand_ins, tmp_path):
    given = [
        f"--output={AWKWARD}", "--pin", "mlp=model", "batch=data", "--model", "llama-3.1-8b", "--dry_run",
        f"--hardware.slice={SLICES.get(target, 'v5e-16')}",
    ]  # fmt: skip
    own = [
        f"--launch.logs={tmp_path}/{AWKWARD}/logs", "--launch.environment", f"NAME={AWKWARD}", f"OTHER={UNPRINTABLE}",
        "--launch.setup", f"echo setup\nexport MADE={shlex.quote(AWKWARD)}",
    ]  # fmt: skip
    script = launch(target, given[0], "--config", str(config), *CLOUD, *given[1:], *own)
    done = stand_ins.run(target, script)
    assert done.returncode == 0, done.stderr
    started = stand_ins.calls("python")
    assert len(started) == 1  # by the stand-ins: on one host
    module, file, *rest = [each for each in started[0]["arguments"] if each not in ("-m", "--config")]
    assert module == "shardplan.eval" and Path(file).name == f"1-{AWKWARD}.yaml" and rest == given
    assert started[0]["files"] == [CONFIG + "\n"]
    environment = started[0]["environment"]
    assert [environment[name] for name in ("NAME", "OTHER", "MADE")] == [AWKWARD, UNPRINTABLE, AWKWARD]
    assert f"#   {AWKWARD} (data.path)" in script and "#   shardplan" not in script
    failed = stand_ins.run(target, script, STAND_IN_CODE="4")
    assert failed.returncode == 4


@pytest.mark.parametrize("target", Target)
def test_scripts_are_clean(target, config):
    """By shellcheck, where there is one; SC2016 is about text that is meant as it is."""
    script = launch(target, "--config", str(config), *CLOUD, f"--hardware.slice={SLICES.get(target, 'v5e-16')}")
    assert not any(line != line.rstrip() for line in script.splitlines())
    if target is Target.RAY:
        compile(script, "ray.py", "exec")
        return
    shell = _shell_of(target, script)
    subprocess.run(["bash", "-n"], input=shell, text=True, check=True)
    if shutil.which("shellcheck"):
        checks = ["shellcheck", "--shell=bash", "--exclude=SC2016", "-"]
        done = subprocess.run(checks, input=shell, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout


def test_several_files_and_a_plan(make_config, stand_ins, tmp_path):
    """All are part of the script; the slice is that of the plan, and later files win as they do here."""
    plan = tmp_path / "plan.json"
    done = run("plan", "--model=llama-3.1-8b", "--hardware.slice=v5e-16", "--workload.batch=16", f"--json={plan}")
    assert done.returncode == 0, done.stderr
    for name in "ab":
        (tmp_path / f"{name}.yaml").write_text(f"data: {{path: gs://bucket/{name}}}\n")
    configs = [f"--config={tmp_path / 'a.yaml'}", f"--config={tmp_path / 'b.yaml'}"]
    script = launch("gcloud", *configs, "--plan", str(plan), "--model.ref=org/model", "--launch.zone=z")
    assert stand_ins.run("gcloud", script).returncode == 0
    (started,) = stand_ins.calls("python")
    assert started["arguments"][2::2] == ["--config", "--config", "--plan", "--model.ref=org/model"]
    assert started["files"][:2] == ["data: {path: gs://bucket/a}\n", "data: {path: gs://bucket/b}\n"]
    (tmp_path / "copy.json").write_text(started["files"][2])
    assert Plan.load(str(tmp_path / "copy.json")) == Plan.load(str(plan))
    assert "v5e-16, 4 hosts" in script and "(data.path)" not in script
    assert "# Every host must have:\n#   shardplan, for its command python: launch.setup" in script
    parsed = run("eval", *configs, "--plan", str(tmp_path / "copy.json"), "--model.ref=org/model", "--dry_run")
    assert parsed.returncode == 0, parsed.stderr


@pytest.mark.quick
def test_a_script_starts_a_training(stand_ins, tmp_path):
    """With Levanter's keys of the file and of the command line; files that these name must be on every host."""
    (tmp_path / "tokens.jsonl").write_text("")
    (tmp_path / "train.yaml").write_text("workload: {kind: train}\ntrainer: {num_train_steps: 5}\n")
    given = [
        "--model=llama-3.1-8b", "--hardware.slice=v5e-16", "--trainer.seed", "3",
        f"--data.cache_dir={tmp_path}/tokens.jsonl",
    ]  # fmt: skip
    files = ["--config", str(tmp_path / "train.yaml")]
    script = launch("gcloud", *files, *given, *CLOUD, command=("launch", "train"))
    done = stand_ins.run("gcloud", script)
    assert done.returncode == 0, done.stderr
    (started,) = stand_ins.calls("python")
    assert started["arguments"][:3] == ["-m", "shardplan.train", "--config"] and started["arguments"][4:] == given
    assert "trainer: {num_train_steps: 5}" in started["files"][0]
    assert f"#   {tmp_path}/tokens.jsonl (data.cache_dir)\n" in script
    assert "shardplan train on v5e-16, 4 hosts" in script and "[s]hardplan.train" in script
    fails(run("launch", "train", *given), 2, "shardplan launch train: launch needs a launcher: --to TARGET")
    fails(run("launch", "train", *given, "--to=ray", "--data.path=x"), 2, "data.path is a key of")


def create_flags(stand_ins, target, slice_name):
    """Flags with which a script asks Google Cloud for a slice, and the names of the VMs that it connects to."""
    script = launch(target, "--model.ref=a/b", "--data.path=gs://b/t", f"--hardware.slice={slice_name}", *CLOUD)
    assert stand_ins.run(target, script).returncode == 0
    calls = [call["arguments"] for call in stand_ins.calls("gcloud")]
    (create,) = [call for call in calls if "create" in call]
    assert all("--zone=us-east5-b" in call for call in calls)
    connected = sorted(call[4] for call in calls if call[3] == "ssh" and "--worker=all" in call)
    return {each for each in create if each.startswith("--") and "zone" not in each}, connected


def test_a_tpu_vm(stand_ins):
    flags, connected = create_flags(stand_ins, "gcloud", "v5e-16")
    assert flags == {"--accelerator-type=v5litepod-16", "--version=v2-alpha-tpuv5-lite"}
    assert connected == ["shardplan"] and (stand_ins.folder / "logs").is_dir()
    flags, _ = create_flags(stand_ins, "gcloud", "v4:4x4x12")
    assert flags == {"--type=v4", "--topology=4x4x12", "--version=tpu-ubuntu2204-base"}


def test_a_slice_that_is_there_is_not_created_again(stand_ins):
    script = launch("gcloud", "--model.ref=a/b", "--data.path=gs://b/t", "--hardware.slice=v6e-8", *CLOUD)
    (stand_ins.bin / "gcloud").write_text(f"#!{sys.executable}\n{STAND_IN.read_text().replace('else 1', 'else 0')}")
    assert stand_ins.run("gcloud", script).returncode == 0
    assert [call["arguments"][3] for call in stand_ins.calls("gcloud")] == ["describe", "ssh"]


def test_queued_slices(stand_ins):
    """The script waits for the grant, and starts all slices."""
    flags, connected = create_flags(stand_ins, "queued", "2xv5e-256")
    names = {"--node-count=2", "--node-prefix=shardplan"}
    assert flags == {"--accelerator-type=v5litepod-256", "--runtime-version=v2-alpha-tpuv5-lite", *names}
    assert connected == ["shardplan-0", "shardplan-1"] and len(stand_ins.calls("python")) == 2
    assert stand_ins.calls("sleep")
    flags, connected = create_flags(stand_ins, "queued", "v5p-64")
    assert flags == {"--accelerator-type=v5p-64", "--runtime-version=v2-alpha-tpuv5", "--node-id=shardplan"}
    assert connected == ["shardplan"]


def test_slices_that_are_not_granted(stand_ins):
    script = launch("queued", "--model.ref=a/b", "--data.path=gs://b/t", "--hardware.slice=v6e-16", *CLOUD)
    done = stand_ins.run("queued", script, STAND_IN_STATE="SUSPENDED")
    assert done.returncode == 1 and not stand_ins.calls("python")
    assert done.stderr == "the request is SUSPENDED; delete it as said above, and run this script again\n"


@pytest.mark.parametrize(
    ("slice_name", "expected"),
    [
        ("2xv6e-256", ("v6e-256", 2)), ("v4:4x4x12", ("v4-4x4x12", 1)), ("tpu7x:2x2x2", ("tpu7x-16", 1)),
    ],
)  # fmt: skip
def test_xpk(stand_ins, slice_name, expected):
    script = launch("xpk", "--model.ref=a/b", "--data.path=gs://b/t", f"--hardware.slice={slice_name}", *CLOUD)
    assert stand_ins.run("xpk", script).returncode == 0
    (call,) = stand_ins.calls("xpk")
    *flags, command = call["arguments"]
    assert flags == [
        "workload", "create", "--workload=shardplan", "--cluster=c", "--zone=us-east5-b",
        f"--tpu-type={expected[0]}", f"--num-slices={expected[1]}", "--docker-image=i",
    ]  # fmt: skip
    assert command.startswith("--command=exec bash -c ")


@pytest.mark.parametrize(
    ("target", "slice_name", "output", "line"),
    [
        ("gcloud", "v5e-16", "results/a", "results/a, a folder that every host must see"),
        ("gcloud", "v5e-16", "gs://bucket/a", "gs://bucket/a"),
        ("slurm", "cpu-8", "results/a", "results/a on the disk of the host"),
    ],
)
def test_where_the_results_are(target, slice_name, output, line):
    evaluation = ("--model.ref=a/b", "--data.path=gs://b/t", f"--hardware.slice={slice_name}", f"--output={output}")
    assert f"# Results: {line}\n" in launch(target, *evaluation, *CLOUD)


def test_skypilot(config):
    evaluation = ("--config", str(config), "--hardware.slice=v5e-256")
    task = yaml.safe_load(launch("skypilot", *evaluation, "--launch.name=my-job", "--launch.zone=us-east5-b"))
    assert task.pop("run").startswith("set -e\n")
    assert task == {
        "name": "my-job", "num_nodes": 1,
        "resources": {"infra": "gcp/us-east5/us-east5-b", "accelerators": "tpu-v5litepod-256"},
    }  # fmt: skip
    assert yaml.safe_load(launch("skypilot", *evaluation))["resources"]["infra"] == "gcp"


def test_slurm(stand_ins):
    """Every task has its number, and its own log; all have the same address, whose port is free."""
    taken = socket.create_server(("localhost", 20000 + 7))
    evaluation = ("--model.ref=a/b", "--data.path=t.jsonl", "--hardware.slice=cpu-8", "--launch.hosts=4")
    script = launch("slurm", *evaluation, "--launch.name=job")
    options = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --job-name=job", "#SBATCH --nodes=4", "#SBATCH --ntasks-per-node=1"} <= {*options}
    with taken:
        assert stand_ins.run("slurm", script).returncode == 0
    started = [call["environment"] for call in stand_ins.calls("python")]
    assert [each["JAX_PROCESS_ID"] for each in started] == list("0123")
    assert {each["JAX_NUM_PROCESSES"] for each in started} == {"4"}
    (address,) = {each["JAX_COORDINATOR_ADDRESS"] for each in started}
    host, _, port = address.rpartition(":")
    assert host == socket.gethostname() and 20007 < int(port) < 20100
    logs = {path.name: path.read_text() for path in (stand_ins.folder / "logs").iterdir()}
    assert logs == {f"job-7-{number}.log": "evaluated\n" for number in range(4)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to=gclod"], "to is 'gclod'; did you mean 'gcloud'?"),
        ([], "launch needs a launcher: --to TARGET; valid: gcloud, queued, ray, skypilot, slurm, xpk"),
        (["--to=gcloud"],
         "hardware.slice cpu-8: gcloud starts TPU slices, such as v5e-16; virtual CPU devices start with slurm or ray"),
        (["--to=gcloud", "--hardware.slice=v5e-16"],
         "launch.zone is not set, which gcloud needs: the zone of the slice, such as us-east5-b"),
        (["--to=xpk", "--hardware.slice=v5e-16", "--launch.zone=z"],
         "launch.cluster is not set, which xpk needs: the name of the cluster"),
        (["--to=gcloud", "--hardware.slice=2xv5e-16", "--launch.zone=z"],
         "hardware.slice 2xv5e-16: gcloud starts one slice; use --to queued or xpk for 2"),
        (["--to=slurm", "--hardware.slice=2xv5e-16"],
         "hardware.slice 2xv5e-16: slurm starts one slice; use --to queued or xpk for 2"),
        (["--to=queued", "--hardware.slice=tpu7x-128", "--launch.zone=z"],
         "hardware.slice tpu7x-128: tpu7x has no TPU VMs, only Kubernetes clusters; use --to xpk"),
        (["--to=xpk", "--hardware.slice=v3-32", *CLOUD], "hardware.slice v3-32: xpk does not have v3; use --to gcloud"),
        (["--to=skypilot", "--hardware.slice=v4:4x4x12"],
         "hardware.slice v4:4x4x12: skypilot has no name for a slice of 4x4x12 chips; use --to gcloud"),
        (["--to=gcloud", "--hardware.slice=v5e:4x12", "--launch.zone=z"],
         "hardware.slice 'v5e:4x12': v5e has no topology 4x12; did you mean 'v5e:8x8'? (topologies: 1x1, 2x2, 2x4, "
         "4x4, 4x8, 8x8, 8x16, 16x16)"),
        (["--to=slurm", "--launch.hosts=3"], "launch.hosts 3 does not divide the devices of cpu-8; use 2"),
        (["--to=slurm", "--launch.hosts=3", "--hardware.slice=v4-64"],
         "launch.hosts is 3, and v4-64 has 8 hosts; leave launch.hosts out"),
        (["--to=slurm", "--launch.hosts=0"], "launch.hosts is 0; it must be at least 1"),
        (["--to=ray", "--launch.name=My job"],
         "launch.name is 'My job'; it must begin with a letter, and be at most 40 lower-case letters, digits and "
         "hyphens, for example 'my-job-2'"),
        (["--to=ray", "--launch.environment", "A"],
         "launch.environment has 'A'; write NAME=value, for example 'HF_HOME=/data/hf'"),
        (["--to=ray", "--data.path=null"],
         "data.path is not set; name a file or folder of texts to evaluate, or use --dry_run"),
        (["--to=ray", "--launch.zon=z"], "command line: unknown key 'launch.zon'; did you mean 'launch.zone'?"),
    ],
)  # fmt: skip
def test_bad_input(arguments, message):
    done = run("launch", "--model.ref=a/b", "--data.path=t.jsonl", *arguments)
    fails(done, 2, f"shardplan launch: {message}")
    assert done.stderr.strip().endswith(message)


@pytest.mark.quick
def test_the_example_in_the_documentation(tmp_path):
    """A launch with it says what it sets; every target has a row in the table."""
    page = (ROOT / "docs" / "howto" / "launching.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "launch.yaml").write_text(example)
    script = launch(
        "gcloud", "--config", str(ROOT / "configs" / "405b.yaml"), "--config", str(tmp_path / "launch.yaml")
    )
    assert "gcloud compute tpus tpu-vm create llama-405b --zone=us-central2-b" in script
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == {*Target}

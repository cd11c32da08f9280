"""python scripts/try_launchers.py slurm ray

Starts the demo's evaluation (configs/tiny.yaml) in two processes of this machine with what `shardplan launch` prints,
and shows their logs: through a Slurm of one node, which is started here (slurmctld, slurmd and sbatch must be
installed, munge need not be), and through Ray, which this Python must have.
"""

import contextlib
import getpass
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 2
ON_ONE_NODE = ("--nodes=1", f"--ntasks-per-node={PROCESSES}", "--output=/dev/null")
"""Options of sbatch by which processes share a node, where the script asks for a node each."""
START_S = 30
"""Seconds in which the node of Slurm becomes idle."""
SLURM_CONF = """\
ClusterName=local
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName=localhost CPUs={processes} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@contextlib.contextmanager
def local_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start a Slurm of one node, this machine, until the block ends.

    Args:
        folder: an empty folder for its state and logs.

    Yields:
        The variables with which sbatch finds it.
    """
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(2)]
        for probe in probes:
            probe.bind(("", 0))
        ports = [probe.getsockname()[1] for probe in probes]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    configuration = folder / "slurm.conf"
    user = getpass.getuser()
    configuration.write_text(SLURM_CONF.format(ports=ports, user=user, folder=folder, processes=PROCESSES))
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    with open(folder / "log", "w") as log, contextlib.ExitStack() as stack:
        for command in (["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", "localhost"]):
            daemon = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)
        deadline = time.monotonic() + START_S
        while subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True).stdout != b"idle\n":
            if time.monotonic() > deadline:
                raise TimeoutError(f"Slurm has not started in {START_S} s:\n{(folder / 'log').read_text()}")
            time.sleep(0.2)
        yield {"SLURM_CONF": str(configuration)}


def run_with_slurm(script: Path, environment: Mapping[str, str]) -> None:
    """Submit a script for `PROCESSES` hosts to a Slurm that has one, and wait for it.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    with TemporaryDirectory() as state, local_slurm(Path(state)) as variables:
        subprocess.run(["sbatch", "--wait", *ON_ONE_NODE, script], env={**environment, **variables}, check=True)


def run_with_ray(script: Path, environment: Mapping[str, str]) -> None:
    """Run a program that starts tasks of Ray, which starts on this machine.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    subprocess.run([sys.executable, str(script)], env=environment, check=True)


RUNS = {"slurm": run_with_slurm, "ray": run_with_ray}


def main() -> int:
    """Run what the command line names; returns an exit code."""
    os.chdir(ROOT)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    for target in sys.argv[1:]:
        with TemporaryDirectory() as folder:
            command = ["shardplan", "launch", "--config", "configs/tiny.yaml", "--to", target]
            command += [f"--launch.hosts={PROCESSES}", f"--launch.logs={folder}", f"--output={folder}/results"]
            print("+", *command, flush=True)
            printed = subprocess.run(
                [sys.executable, "-m", *command], env=environment, check=True, stdout=subprocess.PIPE
            )
            script = Path(folder) / "script"
            script.write_bytes(printed.stdout)
            started = time.monotonic()
            RUNS[target](script, environment)
            for log in sorted(Path(folder).glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()}")
            print(f"{target}: {PROCESSES} processes in {time.monotonic() - started:.0f} s\n", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

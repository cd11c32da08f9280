"""Stands in for a launcher, and for the evaluation that it starts: records its arguments, and runs what it is given.

Its own name says which program it stands in for. Records are lines of JSON in the file STAND_IN_RECORDS.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

RECORDS = Path(os.environ["STAND_IN_RECORDS"])
FILE_FLAGS = ("--config", "--plan")


def main(program: str, arguments: list[str]) -> int:
    """Do what the program would do, as far as scripts rely on it."""
    seen = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    files = [
        Path(path).read_text()
        for flag, path in itertools.pairwise(arguments)
        if flag in FILE_FLAGS and program == "python"
    ]
    record = {"program": program, "arguments": arguments, "files": files, "environment": {**os.environ}}
    with RECORDS.open("a") as file:
        file.write(json.dumps(record) + "\n")
    match program:
        case "gcloud" if "ssh" in arguments:
            # as the real one does: split at blanks, and joined by ssh
            command = next(each for each in arguments if each.startswith("--command=")).removeprefix("--command=")
            return start(" ".join(command.split(" ")))
        case "gcloud" if "describe" in arguments:
            is_there = any("create" in each["arguments"] for each in seen)
            asked = sum("describe" in each["arguments"] for each in seen)
            print(os.environ.get("STAND_IN_STATE", "ACTIVE") if asked > 3 else "WAITING_FOR_RESOURCES")
            return 0 if is_there else 1
        case "xpk":
            command = next(each for each in arguments if each.startswith("--command=")).removeprefix("--command=")
            assert "\n" not in command  # it becomes a line of a YAML file
            return start(f"({command}) & wait $!")
        case "srun":
            command = arguments[arguments.index("bash") :]
            tasks = range(int(os.environ["JAX_NUM_PROCESSES"]))
            codes = [subprocess.run(command, env={**os.environ, "SLURM_PROCID": str(i)}).returncode for i in tasks]
            return max(codes)
        case "python":
            print("evaluated")
            return int(os.environ.get("STAND_IN_CODE", "0"))
    return 0


def start(command: str) -> int:
    """Run a command as a host would, and return its exit code."""
    return subprocess.run(["bash", "-c", command]).returncode


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[0]).name, sys.argv[1:]))

"""Checks the folder of the results, local or in an object store."""

import os
from collections.abc import Iterator

from shardplan.doctor.findings import HostFinding, Level
from shardplan.doctor.folder_space import check_folder
from shardplan.doctor.subject import HostSubject
from shardplan.storage.writing import OutputFolder


def check(subject: HostSubject) -> Iterator[HostFinding]:
    """Write a small file in the folder of the results, and remove it."""
    if "://" not in subject.config.output:
        yield check_folder("output", subject.config.output)
        return
    folder, name = OutputFolder(subject.config.output), f"shardplan-doctor-{os.uname().nodename}-{os.getpid()}"
    with folder.create(name) as file:
        file.write(b"written to see whether this host may write here\n")
    folder.remove(name)
    yield HostFinding(Level.OK, f"output {subject.config.output} can be written")

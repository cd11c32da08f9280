"""The description of a job, from which the script of every launcher is written. Pure: no files, no devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardplan.config.sections import LaunchConfig
from shardplan.errors import ConfigError
from shardplan.hardware import Slice, accelerator_type, chips_per_host, divisors, host_count, topology


@dataclass(frozen=True)
class EmbeddedFile:
    """A file that is part of the script, which writes it to every host."""

    flag: str
    """The command's flag that names the file."""
    name: str
    text: str


@dataclass(frozen=True)
class Job:
    """The command that every host runs, with one process per host."""

    program: str
    """Command of shardplan that the job runs: eval or train."""
    settings: LaunchConfig
    hardware: Slice
    hosts: int
    """Number of hosts of all slices."""
    files: Sequence[EmbeddedFile]
    arguments: Sequence[str]
    """Arguments of the command after those for the files."""
    inputs: Mapping[str, str]
    """Configuration key -> path, which every host must have."""
    output: str
    """The folder of the results, to which every process writes."""

    @property
    def chips_per_host(self) -> int:
        """Number of chips of each host; 0 for virtual CPU devices."""
        return 0 if self.hardware.is_cpu else chips_per_host(self.hardware)

    @property
    def accelerator_type(self) -> str | None:
        """Name of one slice on Google Cloud; None if only its topology describes it."""
        return accelerator_type(self.hardware)

    @property
    def topology(self) -> str:
        """Chips of one slice, as in `4x4x8`."""
        return topology(self.hardware)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every process: name -> value."""
        parts = (text.partition("=") for text in self.settings.environment)
        return {name: value for name, _, value in parts}


def describe_job(
    program: str, settings: LaunchConfig, hardware: Slice, files: Sequence[EmbeddedFile], arguments: Sequence[str],
    inputs: Mapping[str, str], output: str,
) -> Job:  # fmt: skip
    """Describe the job of an evaluation or of a training on a slice.

    Raises:
        ConfigError: `launch.hosts` is not the number of hosts of the TPU slice, or does not divide the number of
            virtual devices.
    """
    hosts, given = (1 if hardware.is_cpu else host_count(hardware)), settings.hosts
    if given is not None and not hardware.is_cpu and given != hosts:
        raise ConfigError(f"launch.hosts is {given}, and {hardware.name} has {hosts} hosts; leave launch.hosts out")
    if given is not None and hardware.is_cpu:
        if hardware.devices % given:
            near = min(divisors(hardware.devices), key=lambda n: abs(n - given))
            raise ConfigError(f"launch.hosts {given} does not divide the devices of {hardware.name}; use {near}")
        hosts = given
    return Job(program, settings, hardware, hosts, files, arguments, inputs, output)

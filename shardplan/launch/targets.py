"""The limits of each launcher, and the settings that it requires."""

from collections.abc import Iterator

from shardplan.config.sections import Target
from shardplan.errors import ConfigError
from shardplan.hardware import cloud_names
from shardplan.launch.job import Job

ON_TPU_VMS = (Target.GCLOUD, Target.QUEUED, Target.SKYPILOT)
"""Launchers that start TPU VMs."""
ON_GOOGLE_CLOUD = (*ON_TPU_VMS, Target.XPK)
MULTISLICE = (Target.QUEUED, Target.XPK)
"""Launchers that can start several slices as one job."""
REQUIRED = {
    Target.GCLOUD: {"zone": "the zone of the slice, such as us-east5-b"},
    Target.QUEUED: {"zone": "the zone of the slice, such as us-east5-b"},
    Target.XPK: {
        "zone": "the zone of the cluster, such as us-east5-b",
        "cluster": "the name of the cluster",
        "image": "a container image in which shardplan is installed",
    },
}
"""Launcher -> the keys of section `launch` that it requires, each with a description."""


def check_target(target: Target, job: Job) -> None:
    """Check that a launcher can start a job.

    Raises:
        ConfigError: the launcher cannot start such a slice, or a key that it needs is not set.
    """
    problem = next(_problems(target, job), None)
    if problem is not None:
        raise ConfigError(problem)


def _problems(target: Target, job: Job) -> Iterator[str]:
    hardware = job.hardware
    slice_ = f"hardware.slice {hardware.name}"
    if target in ON_GOOGLE_CLOUD:
        if hardware.is_cpu:
            yield f"{slice_}: {target} starts TPU slices, such as v5e-16; virtual CPU devices start with slurm or ray"
        elif target in ON_TPU_VMS and cloud_names(hardware).software is None:
            yield f"{slice_}: {hardware.generation.name} has no TPU VMs, only Kubernetes clusters; use --to xpk"
        elif target is Target.XPK and not cloud_names(hardware).has_xpk:
            yield f"{slice_}: xpk does not have {hardware.generation.name}; use --to gcloud"
        elif job.accelerator_type is None and target is Target.SKYPILOT:
            yield f"{slice_}: skypilot has no name for a slice of {job.topology} chips; use --to gcloud"
    if hardware.slices > 1 and target not in MULTISLICE:
        yield f"{slice_}: {target} starts one slice; use --to {' or '.join(MULTISLICE)} for {hardware.slices}"
    for key, meaning in REQUIRED.get(target, {}).items():
        if getattr(job.settings, key) is None:
            yield f"launch.{key} is not set, which {target} needs: {meaning}"

"""Converts the gradient checkpointing of a workload to the form that Levanter's models take."""

from haliax.nn.scan import ScanCheckpointPolicy

from shardplan.plan.workload.checkpointing import CheckpointPolicy


def checkpoint_policy(policy: CheckpointPolicy) -> bool | str | ScanCheckpointPolicy:
    """Return the value of `gradient_checkpointing` of a Levanter model for a policy.

    >>> checkpoint_policy(CheckpointPolicy()), checkpoint_policy(CheckpointPolicy("nested"))
    (True, 'nested')
    >>> checkpoint_policy(CheckpointPolicy(kept=("attn_out",))).save_block_internals
    ['attn_out']
    """
    value = policy.levanter_value
    if isinstance(value, dict):
        return ScanCheckpointPolicy(**value)
    return True if value == "default" else value

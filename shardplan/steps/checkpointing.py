"""The gradient checkpointing of a workload, as Levanter's models take it."""

from haliax.nn.scan import ScanCheckpointPolicy

from shardplan.plan.workload.checkpointing import policy_fields


def checkpoint_policy(value: str) -> bool | str | ScanCheckpointPolicy:
    """Return the value of `gradient_checkpointing` of a Levanter model for that of a workload.

    >>> checkpoint_policy("default"), checkpoint_policy("nested")
    (True, 'nested')
    >>> checkpoint_policy("default+attn_out").save_block_internals
    ['attn_out']
    """
    fields = policy_fields(value)
    if fields is not None:
        return ScanCheckpointPolicy(**fields)
    return True if value == "default" else value

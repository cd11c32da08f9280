"""`shardplan train` in which process 1 gets stuck in a backward pass: `python stuck_train.py STEP ARGUMENTS`.

The gradient of the loss passes through a callback in every process. From the STEPth step on, that of process 1 reads
from a pipe that nobody writes to.
"""

import os
import sys

from faulty_eval import read_pipe

from shardplan.runtime.deferred_packages import defer_unused_packages
from shardplan.runtime.exit_codes import run


def inject(step):
    """Have the loss of Levanter's Trainer get stuck in its backward pass, in process 1."""
    import jax
    from jax.sharding import PartitionSpec
    from levanter.trainer import WrappedLossFunction

    compute, calls = WrappedLossFunction.__call__, []

    def check(gradient):
        calls.append(gradient)
        if jax.process_index() == 1 and len(calls) > (step - 1) * jax.local_device_count():
            read_pipe()
        return gradient

    @jax.custom_vjp
    def with_callback(loss):
        return loss

    def backward(_, gradient):
        everywhere = jax.shard_map(
            lambda value: jax.pure_callback(check, value, value),
            in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False,
        )  # fmt: skip
        return (everywhere(gradient),)

    with_callback.defvjp(lambda loss: (loss, None), backward)

    def stuck(self, *arguments, **settings):
        loss, metrics = compute(self, *arguments, **settings)
        return with_callback(loss), metrics

    WrappedLossFunction.__call__ = stuck


def main(argv):
    """The command with the fault."""
    from shardplan.commands import train

    inject(int(argv[0]))
    train.main(argv[1:])


if __name__ == "__main__":
    defer_unused_packages()
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    raise SystemExit(run("train", main, sys.argv[1:]))

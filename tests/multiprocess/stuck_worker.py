"""Train steps of several processes, in one of which process 1 gets stuck: `python stuck_worker.py PLACE DEADLINE`.

PLACE is `io` (it reads from a pipe that nobody writes to), `lock` (of Python), `backward` (a callback in the backward
pass, before the gradient is summed), or `collective` (that the others never enter). With `late` it begins after the
deadline, and with `absent` not at all.
"""

import sys
import time

import jax
import jax.numpy as jnp
from faulty_eval import read_pipe, take_lock
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.runtime.devices import start_devices

SIZE, STEPS, STUCK_IN = 64, 5, 3


def enter_collective(step, weights, batch):
    jax.block_until_ready(step(weights, batch, False))


def main(place, deadline):
    start_devices("cpu-8", 8, True)
    is_stuck = jax.process_index() == 1
    mesh = jax.make_mesh((8,), ("data",))

    def check(gradient, is_last):
        if is_stuck and place == "backward" and is_last:
            read_pipe()
        return gradient

    @jax.custom_vjp
    def layer(weights, batch, is_last):
        return batch @ weights

    def backward(saved, gradient):
        weights, batch, is_last = saved
        gradient = jax.pure_callback(check, gradient, gradient, is_last)
        return batch.T @ gradient, gradient @ weights.T, None

    layer.defvjp(lambda *arguments: (layer(*arguments), arguments), backward)

    def gradient_of(weights, batch, is_last):
        gradient = jax.grad(lambda w: jnp.sum(layer(w, batch, is_last) ** 2))(weights)
        return jax.lax.psum(gradient, "data")

    step = jax.jit(
        jax.shard_map(gradient_of, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P(), check_vma=False)
    )
    weights, batch = jnp.eye(SIZE), jax.device_put(jnp.ones((SIZE, SIZE)), jax.NamedSharding(mesh, P("data")))
    if is_stuck and place == "absent":
        return
    if is_stuck and place == "late":
        time.sleep(deadline + 2)
    with shardplan.watch("training", deadline, shardplan.end_process) as advance:
        for number in range(STEPS):
            advance(number, f"step {number}")
            if is_stuck and number == STUCK_IN:
                {"io": read_pipe, "lock": take_lock}.get(place, lambda: None)()
                if place == "collective":
                    enter_collective(step, weights, batch)
            if place == "collective" and number == STUCK_IN:
                break
            jax.block_until_ready(step(weights, batch, number == STUCK_IN))
    print("all steps are done")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))

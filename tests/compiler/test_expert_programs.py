"""What the TPU compiler makes of a block of experts and its gradients: kernels, and the strategy's collectives."""

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from shardplan.experts.block import compute_routed_mlp, replace_routed_mlp, routed_mlp
from shardplan.experts.expert_weights import ExpertFunction, ExpertWeights
from shardplan.experts.method import ExpertMethod, ExpertStrategy
from shardplan.hardware import parse_slice
from shardplan.verify.compiler.topology import make_topology_mesh
from shardplan.verify.hlo.collectives import Network
from shardplan.verify.hlo.parser import parse
from shardplan.verify.hlo.timing import model_step

pytestmark = pytest.mark.usefixtures("tpu_compiler")

HARDWARE, SIZES = parse_slice("v5p:2x2x1"), {"replica": 1, "data": 4, "model": 1}
MAPPING = {"batch": "data", "experts": "data"}
Batch, Position, Embed, Mlp, Experts, Choice = hax.make_axes(
    batch=4, position=1024, embed=1024, mlp=512, experts=8, choice=2
)


@pytest.mark.parametrize(
    "strategy",
    [
        ExpertStrategy.EXCHANGE_TOKENS, ExpertStrategy.GATHER_WEIGHTS,
        pytest.param(ExpertStrategy.GATHER_TOKENS, marks=pytest.mark.whole),
    ],
)  # fmt: skip
def test_gradients_of_a_block(strategy):
    """All products are kernels, and none is a dense one over all experts with zeros; rows are exchanged or gathered."""
    mesh = make_topology_mesh(HARDWARE, SIZES)
    method = ExpertMethod(strategy, token_chunks=1)

    def block_sum(x, factors, weights, chosen):
        function = ExpertFunction(lambda gate, up: jax.nn.silu(gate) * up)
        with replace_routed_mlp(lambda call: compute_routed_mlp(call, method, HARDWARE.generation)):
            y = routed_mlp(Experts, Mlp, Embed, x, chosen, factors, weights, function)
        return hax.sum(hax.square(y.astype(jnp.float32))).scalar()

    def abstract(dtype, *axes):
        with hax.axis_mapping(MAPPING):
            spec = hax.partitioning.pspec_for_axis(axes)
        shape, names = tuple(axis.size for axis in axes), tuple(axis.name for axis in axes)
        return hax.NamedArray(jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)), names)

    up, down = (Experts, Embed, Mlp), (Experts, Mlp, Embed)
    weights = ExpertWeights(abstract(jnp.bfloat16, *up), abstract(jnp.bfloat16, *up), abstract(jnp.bfloat16, *down))
    arguments = (
        abstract(jnp.bfloat16, Batch, Position, Embed), abstract(jnp.float32, Batch, Position, Choice), weights,
        abstract(jnp.int32, Batch, Position, Choice),
    )  # fmt: skip

    def gradients(*arguments):
        with hax.axis_mapping(MAPPING):
            return jax.grad(block_sum, (0, 1, 2))(*arguments)

    with jax.set_mesh(mesh):
        text = jax.jit(gradients).lower(*arguments).compile().as_text()
    timing = model_step(parse(text), Network(SIZES, HARDWARE, [0] * HARDWARE.devices), HARDWARE)
    assert timing.kernel_seconds > 0 and timing.masked_dense_seconds == 0
    # of an exchange only the numbers of rows are gathered, less than a kilobyte
    kinds = {use.transfer.kind for use in timing.uses if use.transfer.bytes >= 1024}
    if strategy is ExpertStrategy.EXCHANGE_TOKENS:
        assert kinds == {"ragged-all-to-all"}
    else:
        assert "all-gather" in kinds and "ragged-all-to-all" not in kinds

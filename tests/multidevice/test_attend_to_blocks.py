"""Attention to blocks from outside, chosen as MoBA does and at random, against loops in NumPy and float64."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_steps import block_step, block_tasks, sharding
from sparse_attention_cases import GATHERED, KERNEL, LONG, Case, positions
from test_native_sparse_attention_traffic import received_by_shape

from shardplan.attention import attend_to_blocks
from shardplan.cost.gspmd import device_cost
from shardplan.errors import ConfigError
from shardplan.model.gradient_checkpointing.activation_names import ActivationName

BLOCK, CHOSEN, GROUPS, KEY_SIZE, VALUE_SIZE = 8, 4, 2, 8, 6


def inputs_of(case, heads, seed=0):
    """Queries, keys, values and a cotangent of the output, in the order of the sequence."""
    tokens, rng = (case.batch, case.positions, GROUPS), np.random.default_rng(seed)
    sizes = (heads, KEY_SIZE), (KEY_SIZE,), (VALUE_SIZE,), (heads, VALUE_SIZE)
    return [rng.normal(size=(*tokens, *size)) for size in sizes]


def moba_blocks(queries, keys):
    """The blocks that every query selects: its own, and those before it whose mean key has the largest product.

    Heads of a group select by the sum of their products; MoBA has one head in a group.
    """
    blocks = np.full((*queries.shape[:3], CHOSEN), -1)
    for b, t, g in np.ndindex(queries.shape[:3]):
        own = t // BLOCK
        means = [keys[b, j * BLOCK : (j + 1) * BLOCK, g].mean(axis=0) for j in range(own)]
        scores = [(queries[b, t, g] @ mean).sum() for mean in means]
        best = sorted(range(own), key=lambda j: (-scores[j], j))[: CHOSEN - 1]
        blocks[b, t, g, : len(best) + 1] = [own, *best]
    return blocks


def random_blocks(shape, seed=1):
    """Different blocks in any order, some missing, some after the query, and one after the sequence."""
    batch, length, groups = shape[:3]
    rng, count = np.random.default_rng(seed), -(-length // BLOCK)
    blocks = np.full((batch, length, groups, CHOSEN), -1)
    for row in np.ndindex(batch, length, groups):
        chosen = rng.permutation(count + 1)[:CHOSEN]
        blocks[row][: len(chosen)] = np.where(rng.random(len(chosen)) < 0.4, -1, chosen)
    return blocks


def expected_results(queries, keys, values, cotangent, blocks):
    """The output, and the gradients of queries, keys and values of sum(output * cotangent)."""
    output, scale = np.zeros((*queries.shape[:4], values.shape[-1])), queries.shape[-1] ** -0.5
    of_queries, of_keys, of_values = map(np.zeros_like, (queries, keys, values))
    for b, t, g, r in np.ndindex(queries.shape[:4]):
        tokens = [s for j in blocks[b, t, g] if j >= 0 for s in range(j * BLOCK, (j + 1) * BLOCK) if s <= t]
        if not tokens:
            continue
        k, v, q, upstream = keys[b, tokens, g], values[b, tokens, g], queries[b, t, g, r], cotangent[b, t, g, r]
        weights = np.exp(k @ q * scale - (k @ q * scale).max())
        weights /= weights.sum()
        output[b, t, g, r] = weights @ v
        of_scores = weights * (v @ upstream - output[b, t, g, r] @ upstream) * scale
        of_queries[b, t, g, r] = of_scores @ k
        of_keys[b, tokens, g] += np.outer(of_scores, q)
        of_values[b, tokens, g] += np.outer(weights, upstream)
    return output, (of_queries, of_keys, of_values)


def named(x, *axes):
    """Named arrays of the given arrays [batch, position, kv_head, ...]."""
    return hax.named(x, ("batch", "position", "kv_head", *axes))


def attend(case, queries, keys, values, blocks):
    return attend_to_blocks(
        named(queries, "q_heads_per_group", "head_size"), named(keys, "head_size"), named(values, "value_head_size"),
        named(blocks, "selected"), BLOCK, case.method, layout=case.layout, queries_per_chunk=case.queries_per_chunk,
    ).array  # fmt: skip


def results(case, arrays, selections):
    """The output and gradients for each selection, by one program on the mesh, in the order of the sequence."""

    def compute():
        queries, keys, values, cotangent = (jnp.asarray(x[:, case.order], jnp.float32) for x in arrays)

        def loss(queries, keys, values, blocks):
            output = attend(case, queries, keys, values, blocks)
            return (output * cotangent).sum(), output

        run = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
        return [run(queries, keys, values, blocks[:, case.order]) for blocks in selections]

    restore = np.argsort(case.order)
    for gradients, output in case.run(compute):
        yield np.asarray(output)[:, restore], [np.asarray(gradient)[:, restore] for gradient in gradients]


MIXED = {"batch": "data", "position": "sequence", "kv_head": "model"}
CASES = {
    "one device, chunks": (Case({"data": 1}, {}, 45, batch=2, queries_per_chunk=16), 3),
    "one device, gathered": (Case({"data": 1}, {}, 45, method=GATHERED, queries_per_chunk=LONG), 1),
    "one device, kernel": (Case({"data": 1}, {}, 77, method=KERNEL), 1),
    "positions 2": (positions(2, method=GATHERED, batch=2, queries_per_chunk=20), 1),
    "positions 3": (positions(3), 3),
    "zigzag 3, kernel": (positions(3, layout="zigzag", method=KERNEL), 2),
    "zigzag 4": (positions(4, 64, layout="zigzag"), 1),
    "positions 8": (positions(8, 128, method=GATHERED), 1),
    "groups 2, batch 2": (Case({"data": 2, "model": 2}, {"batch": "data", "kv_head": "model"}, 40, batch=2), 2),
    "heads 2, positions 2, kernel": (
        Case({"a": 2, "b": 2}, {"q_heads_per_group": "a", "position": "b"}, 64, method=KERNEL), 4
    ),
    "replicated": (Case({"replica": 2, "sequence": 2}, {"position": "sequence"}, 32), 1),
    "mixed 8": (
        Case({"model": 2, "sequence": 2, "data": 2}, MIXED, 64, layout="zigzag", batch=2, method=GATHERED), 1
    ),
}  # fmt: skip
WHOLE = ("zigzag 4", "positions 3", "replicated", "one device, gathered")


ALL_CASES = [pytest.param(*CASES[name], id=name, marks=[pytest.mark.whole] * (name in WHOLE)) for name in CASES]


@pytest.mark.parametrize(("case", "heads"), ALL_CASES)
def test_equals_loops(case, heads):
    arrays = inputs_of(case, heads)
    selections = [moba_blocks(*arrays[:2]), random_blocks(arrays[0].shape)]
    for blocks, (output, gradients) in zip(selections, results(case, arrays, selections), strict=True):
        expected, expected_gradients = expected_results(*arrays, blocks)
        assert np.abs(output - expected).max() < 1e-5
        is_empty = ~expected.any(axis=-1)
        assert not output[is_empty].any() and not gradients[0][is_empty].any()
        for gradient, by_loops in zip(gradients, expected_gradients, strict=True):
            assert np.abs(gradient - by_loops).max() <= 1e-4 * np.abs(by_loops).max()
    assert is_empty.any()  # queries whose random blocks are missing or after them


def by_compiler(queries, keys, layout_order):
    """The rule of MoBA on arrays in the order of a layout, for the compiler to partition."""
    numbers = jnp.asarray(layout_order[::BLOCK] // BLOCK)
    means = keys.reshape(len(keys), -1, BLOCK, *keys.shape[2:]).mean(axis=2)
    scores = jnp.einsum("btgrd,bjgd->btgj", queries, means)
    own = jnp.asarray(layout_order // BLOCK)[:, None, None]
    scores = jnp.where(numbers < own, scores, jnp.where(numbers == own, jnp.inf, -jnp.inf))
    best, indices = jax.lax.top_k(scores, CHOSEN)
    return jnp.where(best == -jnp.inf, -1, numbers[indices])


def test_rule_and_attention_in_one_program():
    """Blocks are computed from sharded queries and keys, and attention to them, in one program."""
    case, heads = CASES["mixed 8"]
    queries, keys, values, cotangent = inputs_of(case, heads)

    def compute():
        def loss(queries, keys, values):
            blocks = by_compiler(queries, keys, case.order)
            output = attend(case, queries, keys, values, blocks)
            return (output * jnp.asarray(cotangent[:, case.order], jnp.float32)).sum(), (output, blocks)

        arrays = (jnp.asarray(x[:, case.order], jnp.float32) for x in (queries, keys, values))
        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)

    gradients, (output, blocks) = case.run(compute)
    restore, chosen = np.argsort(case.order), moba_blocks(queries, keys)
    assert (np.sort(np.asarray(blocks)[:, restore]) == np.sort(chosen)).all()
    expected, expected_gradients = expected_results(queries, keys, values, cotangent, chosen)
    assert np.abs(np.asarray(output)[:, restore] - expected).max() < 1e-5
    for gradient, by_loops in zip(gradients, expected_gradients, strict=True):
        assert np.abs(np.asarray(gradient)[:, restore] - by_loops).max() <= 1e-4 * np.abs(by_loops).max()


def test_a_policy_keeps_the_blocks():
    """Gradient checkpointing that saves the blocks selects none again."""
    case = Case({"data": 1}, {}, 40)
    queries, keys, values, _ = (jnp.asarray(x, jnp.float32) for x in inputs_of(case, 1))

    def loss(queries):
        return attend(case, queries, keys, values, by_compiler(queries, keys, case.order)).sum()

    keep_blocks = jax.checkpoint_policies.save_only_these_names(ActivationName.SELECTED_BLOCKS.value)
    for policy, selections in ((jax.checkpoint_policies.nothing_saveable, 2), (keep_blocks, 1)):
        program = str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy)))(queries))
        assert program.count("top_k") == selections


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (positions(4, 104), "104 positions over 4 devices, contiguous; they must be a multiple of 32, so that no block "
         "of 8 is divided: use 96 or 128"),
        (positions(2, layout="striped"), "layout is striped; blocks and windows need neighbouring tokens: use "
         "contiguous or zigzag"),
        (Case({"data": 2}, {"batch": "data", "position": "data"}, batch=2), "batch and position are both mapped to "
         "data; map each of them to mesh axes of its own"),
        (Case({"model": 2}, {"q_heads_per_group": "model"}), "q_heads_per_group (1) is not divisible by the 2 devices "
         "that shard it"),
    ],
)  # fmt: skip
def test_refused_shardings(case, message):
    # the input is in the order of positions, because it is refused before it is read
    arrays = [jnp.asarray(x) for x in inputs_of(case, 1)[:3]]
    with pytest.raises(ConfigError) as raised:
        case.run(lambda: attend(case, *arrays, jnp.zeros((*arrays[0].shape[:3], CHOSEN), int)))
    assert str(raised.value) == f"attend_to_blocks: {message}"


TRAFFIC_CASES = {
    **{name: CASES[name] for name in ("positions 2", "groups 2, batch 2", "replicated", "mixed 8")},
    "heads 2": (Case({"data": 2, "model": 2}, {"batch": "data", "q_heads_per_group": "model"}, 40, batch=2), 2),
    "unsharded": (Case({"data": 2}, {}, 40), 1),
}


@pytest.mark.parametrize(("case", "heads"), TRAFFIC_CASES.values(), ids=TRAFFIC_CASES)
def test_plans_price_the_transfers_of_the_compiled_program(case, heads):
    """A forward pass with its gradients: bytes that a device receives, by kind of collective."""
    arrays = inputs_of(case, heads)[:3]

    def compile_program():
        own = ("q_heads_per_group", "head_size"), ("head_size",), ("value_head_size",)
        inputs = [hax.shard(named(jnp.asarray(x, jnp.float32), *axes)) for x, axes in zip(arrays, own, strict=True)]
        blocks = jnp.zeros((*arrays[0].shape[:3], CHOSEN), int)

        def loss(*inputs):
            output = attend(case, *(x.array for x in inputs), blocks)
            return (output * inputs[0].array[..., :VALUE_SIZE]).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*inputs).compile().as_text()

    devices = int(np.prod([*case.mesh.values()]))
    received = {}
    for (kind, _), size in received_by_shape(case.run(compile_program), devices).items():
        received[kind] = received.get(kind, 0) + size.max()
    step = block_step(
        arrays[0].shape, VALUE_SIZE, CHOSEN, jnp.float32, True, BLOCK, case.method, layout=case.layout
    )  # fmt: skip
    priced = {}
    for task in block_tasks(step):
        for traffic in device_cost(task, sharding(case.mesh, case.mapping, scatters_over_slice=True)).traffic:
            priced[traffic.kind.value] = priced.get(traffic.kind.value, 0) + traffic.bytes
    assert priced == pytest.approx(received)

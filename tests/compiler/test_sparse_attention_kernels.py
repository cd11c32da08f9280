"""Kernels of native sparse attention as the TPU compiler compiles them: it accepts them, and what memory they need."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from shardplan.decoder import NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.kernels.compressed_kernel import attend_to_compressed_by_kernel
from shardplan.decoder.parts.attention.sparse.kernels.selected_kernel import attend_by_kernel
from shardplan.decoder.parts.attention.sparse.kernels.window.kernel import attend_to_windows_by_kernel
from shardplan.hardware import GIB, parse_slice
from shardplan.verify.compiler.topology import make_topology_mesh

pytestmark = pytest.mark.usefixtures("tpu_compiler")

PAPER = NativeSparseConfig(2560, 4, 16, 128, 128, block=32, stride=16, selection_block=64, selected=16, window=512)


def compile_on_each_device(function, slice_name, *arrays):
    """Compile a function of one device; the compiler chooses layouts, as it does for what is before and after."""
    hardware = parse_slice(slice_name)
    mesh = make_topology_mesh(hardware, {"device": hardware.devices})
    spec = PartitionSpec("device")
    layout = Format(Layout.AUTO, NamedSharding(mesh, spec))
    structs = [jax.ShapeDtypeStruct((hardware.devices, *shape), dtype) for shape, dtype in arrays]
    run = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(run, in_shardings=layout, out_shardings=layout).lower(*structs).compile()


def arrays_of(config, length, keys):
    """Queries, keys and values, of one sequence."""
    of_keys = keys, config.groups
    return (
        ((length, config.groups, config.heads_per_group, config.key_size), jnp.bfloat16),
        ((*of_keys, config.key_size), jnp.bfloat16),
        ((*of_keys, config.value_size), jnp.bfloat16),
    )


def test_memory_of_the_selected_branch():
    """Tables and log-sum-exp are all that the forward pass needs beyond its inputs and its output."""
    length = 65536
    blocks = (length, PAPER.groups, PAPER.selected), jnp.int32

    def attend(blocks, queries, keys, values):
        return attend_by_kernel(PAPER.selection, False, jnp.arange(length), blocks, queries, keys, values)[0]

    compiled = compile_on_each_device(attend, "v5p-8", blocks, *arrays_of(PAPER, length, length))
    memory = compiled.memory_analysis()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1
    assert memory.peak_memory_in_bytes < 2.3 * GIB and memory.temp_size_in_bytes < 0.1 * GIB


def test_memory_of_the_window_branch():
    """Padded keys and values, and log-sum-exp, are all that the forward pass needs beyond its inputs and its output."""
    length = 65536

    def attend(queries, keys, values):
        return attend_to_windows_by_kernel(PAPER, jnp.int32(0), queries, keys, values)

    compiled = compile_on_each_device(attend, "v5p-8", *arrays_of(PAPER, length, length + PAPER.window - 1))
    memory = compiled.memory_analysis()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1
    needed = 4 * (length + 512) * 256 * 2 + length * 64 * 4
    assert memory.peak_memory_in_bytes < 2.3 * GIB and memory.temp_size_in_bytes < 1.1 * needed


@pytest.mark.parametrize(
    ("slice_name", "heads", "key_size", "value_size", "selection_block"),
    [
        ("v5p-8", 16, 192, 128, 64),
        *(
            pytest.param(*case, marks=pytest.mark.whole)
            for case in (
                ("v5p-8", 1, 64, 64, 32), ("v5p-8", 12, 80, 80, 48), ("v5p-8", 64, 128, 128, 64),
                ("v4-8", 16, 192, 128, 64), ("v5e-4", 16, 192, 128, 64), ("v6e-4", 16, 192, 128, 64),
                ("tpu7x-8", 16, 192, 128, 64),
            )
        ),
    ],
)  # fmt: skip
def test_forward_and_backward_compile(slice_name, heads, key_size, value_size, selection_block):
    length = 1024
    config = NativeSparseConfig(256, 2, heads, key_size, value_size, 32, 16, selection_block, 8, 64)
    blocks = (length, 2, 8), jnp.int32

    def attend(queries, keys, values, compressed_keys, compressed_values, window_keys, window_values, blocks):
        positions, count = jnp.arange(length), config.selection_blocks(length)
        output, _ = attend_by_kernel(config.selection, True, positions, blocks, queries, keys, values)
        compressed = attend_to_compressed_by_kernel(
            config, count, positions, queries, compressed_keys, compressed_values
        )
        windows = attend_to_windows_by_kernel(config, jnp.int32(0), queries, window_keys, window_values)
        return output, *compressed, windows

    def gradients(blocks, *arrays):
        results, backward = jax.vjp(lambda *x: attend(*x, blocks), *arrays)
        return results[2], backward(results)

    of_compressed = arrays_of(config, length, config.compressed_blocks(length))[1:]
    of_window = arrays_of(config, length, length + config.window - 1)[1:]
    arrays = (*arrays_of(config, length, length), *of_compressed, *of_window)
    compiled = compile_on_each_device(gradients, slice_name, blocks, *arrays)
    # forward and backward of three branches, which is two kernels for windows, and the importance
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 8

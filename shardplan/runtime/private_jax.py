"""The private parts of JAX that shardplan uses; only this module may use them.

Their names and parameters are checked when this module is imported, so that another version of JAX fails at once, with
one line that says what differs, and not in the middle of a run.
"""

import ctypes
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import jax
from jax._src import distributed, hardware_utils
from jax._src.clusters import ClusterEnv
from jax._src.lib import _jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from shardplan.errors import ConfigError

DETECTION_S = 300
"""Maximum seconds until the name of a cluster's first host is known."""
TESTED = "0.11.2"
"""Version of JAX with which all tests of shardplan pass."""
ATTENTION_INPUTS = ("q", "k", "v", "segment_ids", "sinks")
ATTENTION_GRADIENTS = ("logsumexp", "do", "di")
SETTINGS = ("is_mqa", "mask_value", "attn_logits_soft_cap", "mask_function", "interpret")
LAYOUTS = ("q_layout", "k_layout", "v_layout")
EXPECTED_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "_splash_attention_forward": (
        "fwd_mask_info", *ATTENTION_INPUTS, "mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name",
        "save_residuals", "mask_function", "attn_logits_soft_cap", "interpret",
    ),
    "_splash_attention_bwd_dq": (
        *ATTENTION_INPUTS, *ATTENTION_GRADIENTS, "bq", "bkv", "mask_info", *SETTINGS, *LAYOUTS,
    ),
    "_splash_attention_bwd_dkv": (
        *ATTENTION_INPUTS, *ATTENTION_GRADIENTS, "bq", "bkv", "bkv_compute", "mask_info", "use_fused_bwd_kernel",
        *SETTINGS, *LAYOUTS,
    ),
}  # fmt: skip
"""Function of splash attention -> its parameters: for the forward pass all in order, for the others only arrays."""


def _check() -> None:
    """Check that the installed JAX has the private names and parameters that shardplan uses.

    Raises:
        ConfigError: something is missing, or has other parameters.
    """
    names = (*EXPECTED_PARAMETERS, "BlockSizes", "SegmentIds", "DEFAULT_MASK_VALUE", "make_splash_mha")
    problems = [f"splash attention has no {name}" for name in names if not hasattr(splash, name)]
    for name, expected in EXPECTED_PARAMETERS.items():
        actual = tuple(inspect.signature(getattr(splash, name)).parameters) if hasattr(splash, name) else expected
        ordered = len(expected) if name == "_splash_attention_forward" else len(ATTENTION_INPUTS + ATTENTION_GRADIENTS)
        if actual[:ordered] != expected[:ordered] or {*actual} != {*expected}:
            differing = sorted({*actual} ^ {*expected}) or ["their order"]
            problems.append(f"{name} has other parameters ({', '.join(differing)})")
    if MaskInfo._fields[:5] != ("data_next", "mask_next", "block_mask", "partial_mask_blocks", "q_sequence"):
        problems.append(f"MaskInfo has the fields {', '.join(MaskInfo._fields)}")
    state = distributed.global_state
    problems += [
        f"the state of jax.distributed has no {name}"
        for name in ("client", "coordinator_address", "num_processes", "preemption_sync_manager")
        if not hasattr(state, name)
    ]
    if not hasattr(ClusterEnv, "auto_detect_unset_distributed_params"):
        problems.append("clusters are not detected")
    if not hasattr(_jax, "get_distributed_runtime_service"):
        problems.append("there is no coordination service")
    if not hasattr(hardware_utils, "num_available_tpu_chips_and_device_id"):
        problems.append("TPU chips are not counted")
    if problems:
        raise ConfigError(
            f"jax {jax.__version__} does not fit shardplan: {'; '.join(problems)}; install the one that it is tested "
            f"with ({TESTED})"
        )


_check()

SplashBlockSizes = splash.BlockSizes
SplashMaskInfo = MaskInfo
SplashSegmentIds = splash.SegmentIds
MASKED_SCORE: float = splash.DEFAULT_MASK_VALUE
"""Score that the kernels of splash attention give to masked pairs."""
splash_forward: Callable[..., Any] = splash._splash_attention_forward
splash_query_gradient: Callable[..., Any] = splash._splash_attention_bwd_dq
splash_key_value_gradients: Callable[..., Any] = splash._splash_attention_bwd_dkv


@contextmanager
def named_splash_residuals(name: str) -> Iterator[None]:
    """Make splash attention name its output and its log-sum-exp within the context, whatever code calls it."""
    make_named = partial(splash.make_splash_mha, residual_checkpoint_name=name)
    with mock.patch.object(splash, "make_splash_mha", make_named):
        yield


def detect_cluster() -> tuple[str, int, int] | None:
    """Return a cluster's address of process 0, number of processes, and index of this process; None without a cluster.

    JAX recognises clusters such as Cloud TPU, Slurm and Kubernetes.
    """
    detected = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, DETECTION_S)
    address, count, index, _ = detected
    return None if address is None or count is None or index is None else (address, count, index)


def count_tpu_chips() -> tuple[int, str]:
    """Return the number of TPU chips on this host's PCI bus, and their generation ("" without chips)."""
    chips, version = hardware_utils.num_available_tpu_chips_and_device_id()
    return chips, version.name if version is not None else ""


def process_count() -> int:
    """Return the number of processes that `jax.distributed` has connected; 1 if it was not started."""
    return int(distributed.global_state.num_processes or 1)


def coordinator_address() -> str | None:
    """Return the address (host:port) of process 0; None if `jax.distributed` was not started."""
    address: str | None = distributed.global_state.coordinator_address
    return address


def key_value_store() -> Any:
    """Return the client of the key-value store in process 0; None if `jax.distributed` was not started."""
    return distributed.global_state.client


def start_coordination_service(port: int, count: int) -> Any:
    """Start, on all interfaces, the service through which JAX connects `count` processes, and return it."""
    return _jax.get_distributed_runtime_service(f"[::]:{port}", count)


def reached_preemption_sync_point(number: int) -> bool:
    """Return whether all processes must stop at the sync point `number`; False if JAX does not watch for preemption."""
    manager = distributed.global_state.preemption_sync_manager
    return manager is not None and bool(manager.reached_sync_point(number))


def abandon_coordination() -> None:
    """Make JAX skip the wait for other processes at exit, because one of them will never reach its end."""
    state = distributed.global_state
    for each in (state.client, state.preemption_sync_manager):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))  # for ever: their destructors would wait
    state.client = state.preemption_sync_manager = None


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and carried values among a scan's operands; the other operands are stacks."""
    if "ft_in" in params:  # JAX 0.11
        constants, carry, _ = params["ft_in"].unpack()
        return len(constants), len(carry)
    return params["num_consts"], params["num_carry"]

"""The reasons of a search: rejections of choices, counted by type, and sentences about the chosen plan.

Other code decides by the types (`Rejection`, `Caveat`), never by the sentences, which `SearchInfo.reasons` holds.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from shardplan.cost.sharding import ShardingAssignment
from shardplan.errors import nearest
from shardplan.experts.method import ExpertStrategy
from shardplan.hardware import GIB
from shardplan.plan.attention_plan import SparseKernel, Strategy
from shardplan.plan.file.sections import Caveat
from shardplan.plan.mapping import AxisMapping, MeshAxes, grouped_text, mesh_size, mesh_text
from shardplan.plan.workload.workload import BATCH_AXIS
from shardplan.program.marked.attention_kind import AttentionKind
from shardplan.program.tasks import Step
from shardplan.search.components.compute_sharding import AttentionMethod
from shardplan.search.other_form import OtherForm
from shardplan.search.ranking import Candidate
from shardplan.search.tolerances import TIME_RESOLUTION

GIVEN = "mesh and mappings were given, not searched for"
NEGLIGIBLE = 1e-3
"""Fraction of a step's time below which transfers count as fully overlapped."""
CAVEATS = {
    Caveat.NO_ATTENTION_KERNEL: "no kernel can run attention here, so its time is a guess: it runs as a loop whose "
    "length the compiler does not report",
    Caveat.OFFLOAD_NOT_PRICED: "the step time is too short: it leaves out the copies of offloaded activations to the "
    "host and back",
    Caveat.SLICED_ACTIVATIONS: "parameters are sharded over a mesh axis that shards neither the batch nor positions: "
    "devices repeat work, and the compiler slices activations where the estimates assume that it gathers parameters",
    Caveat.REPEATED_WORK: "a mesh axis of several devices shards no computation: devices along it repeat work, and the "
    "compiler may exchange more among them than is estimated",
}
STRATEGIES = {
    Strategy.NONE: "attention is Levanter's own",
    Strategy.ALL_GATHER: "keys and values gathered",
    Strategy.RING: "keys and values pass around a ring of {ring}",
    Strategy.ULYSSES: "attention reshards to heads (Ulysses, all-to-all)",
    Strategy.HYBRID: "attention reshards to heads in groups of {ulysses} (Ulysses, all-to-all), keys and values pass "
    "around a ring of {ring} groups",
}
SPARSE_METHODS = {
    SparseKernel.DENSE_MASK: "selected blocks by a dense mask: scores of all tokens are computed",
    SparseKernel.GATHERED_BLOCKS: "selected blocks are gathered for every query",
    SparseKernel.KERNEL: "kernels compute native sparse attention: tiles of queries attend to the union "
    "of their blocks",
}
EXPERT_STRATEGIES = {
    ExpertStrategy.GATHER_TOKENS: "devices gather the tokens of their group and scatter the sums",
    ExpertStrategy.EXCHANGE_TOKENS: "tokens are exchanged with the devices of their experts (ragged all-to-all)",
    ExpertStrategy.GATHER_WEIGHTS: "devices gather the weights of all experts",
}


class Rejection(StrEnum):
    """Why a mesh, a mesh subproblem or a choice of mesh axes was rejected."""

    BATCH = "batch"
    """A mesh has no valid mapping of batch and positions."""
    INDIVISIBLE = "indivisible"
    """The size of a logical axis is not divisible by the devices along its mesh axes."""
    MEMORY = "memory"
    """Nothing fits in the memory of a device."""
    SLOWER = "slower"
    """A lower bound of the time exceeds the times of the candidates kept so far."""
    IDLE = "idle"
    """Devices along a mesh axis would repeat the same work, because it shards no computation."""
    DUPLICATE = "duplicate"
    """Every mapping puts a mesh axis on two dimensions of one array."""


class Indivisible(NamedTuple):
    """A logical axis that cannot be sharded evenly over mesh axes."""

    axis: str
    size: int
    mesh_axes: MeshAxes
    devices: int
    """Number of devices along `mesh_axes`."""


class Alternative(NamedTuple):
    """Another method of attention or experts under the plan's mesh and mappings, and its cost of a step."""

    name: str
    seconds: float
    peak_bytes: float
    """Peak bytes per device."""


@dataclass
class SearchStatistics:
    """Counters of one search."""

    evaluated: int = 0
    """Number of choices evaluated for single components (`shardplan.search.subproblem.component_choices`)."""
    rejected: Counter[Rejection] = field(default_factory=Counter)
    indivisible: dict[str, Indivisible] = field(default_factory=dict)
    """Logical axis -> the first mesh axes whose devices did not divide it."""


def caveats_of(assignment: ShardingAssignment) -> list[Caveat]:
    """Return the caveats that a sharding has under every workload.

    >>> mesh, compute = {"replica": 1, "data": 4, "model": 2}, {"batch": ("data",)}
    >>> caveats_of(ShardingAssignment(mesh, compute, {}, {}, ("batch", "position")))
    [<Caveat.REPEATED_WORK: 'repeated_work'>]
    """
    sliced = [Caveat.SLICED_ACTIVATIONS] if assignment.sliced_mesh_axes else []
    return sliced + ([Caveat.REPEATED_WORK] if assignment.idle_mesh_axes else [])


def describe_choice(*, fits: bool, evaluated: int, has_kernel: bool) -> str:
    """Explain in one sentence why the search chose the plan.

    >>> describe_choice(fits=False, evaluated=751, has_kernel=True)
    'no plan fits; of 751 candidates this one needs the least memory'
    >>> describe_choice(fits=True, evaluated=751, has_kernel=True)
    'fastest of 751 candidates (ties within 0.1 %: smallest memory); attention runs in a kernel'

    Args:
        evaluated: the number of candidates.
        has_kernel: whether a kernel can run attention.
    """
    if not fits:
        return f"no plan fits; of {evaluated} candidates this one needs the least memory"
    kernel = "; attention runs in a kernel" if has_kernel else ""
    return f"fastest of {evaluated} candidates (ties within {100 * TIME_RESOLUTION:g} %: smallest memory){kernel}"


def describe_time(
    step: float, compute: float, weight_gathers: float, other_collectives: float, exposed_host_copies: float = 0.0
) -> str:
    """Describe the parts of a step's time, all in seconds; transfers include their overlapped part.

    >>> describe_time(step=1.2, compute=1.0, weight_gathers=0.3, other_collectives=0.1)
    'compute 1 s, weight gathers 0.3 s (0.1 s exposed), other collectives 0.1 s'
    >>> describe_time(step=1.1, compute=1.0, weight_gathers=0.3, other_collectives=0.1)
    'compute 1 s, weight gathers 0.3 s (overlapped), other collectives 0.1 s'

    Args:
        exposed_host_copies: copies between devices and hosts that no computation hides.
    """
    exposed, least = max(0.0, step - compute - other_collectives - exposed_host_copies), NEGLIGIBLE * step
    overlap = "overlapped" if exposed < least else f"{exposed:.3g} s exposed"
    gathers = f"weight gathers {weight_gathers:.3g} s ({overlap})" if weight_gathers >= least else "no weight gathers"
    others = f"other collectives {other_collectives:.3g} s" if other_collectives >= least else "no other collectives"
    return f"compute {compute:.3g} s, {gathers}, {others}"


def describe_host_copies(host_bytes: float, seconds: float, exposed: float) -> str:
    """Describe the host memory of a device's arrays, and the seconds of copies.

    >>> describe_host_copies(host_bytes=2**31, seconds=0.5, exposed=0.0)
    'host memory: 2.00 GiB per device, copies 0.5 s (overlapped)'

    Args:
        seconds: seconds of all copies to the host and back, in a step.
        exposed: the seconds that no computation hides.
    """
    overlap = f"{exposed:.3g} s exposed" if exposed > NEGLIGIBLE * seconds else "overlapped"
    return f"host memory: {host_bytes / GIB:.2f} GiB per device, copies {seconds:.3g} s ({overlap})"


def describe_runner_up(best: Candidate, other: Candidate, settings: str) -> str:
    """Compare the runner-up `other` with the best candidate: time, memory, mesh, and mappings axis by axis.

    >>> from types import SimpleNamespace
    >>> mapped, replicated = SimpleNamespace(compute={"mlp": ("model",)}), SimpleNamespace(compute={})
    >>> best = SimpleNamespace(mesh={"model": 4}, assignment=mapped, params={}, seconds=1.0, peak_bytes=8 * GIB)
    >>> other = SimpleNamespace(mesh={"data": 4}, assignment=replicated, params={}, seconds=1.1, peak_bytes=9 * GIB)
    >>> describe_runner_up(best, other, "")
    'runner-up: mesh data 4, +10.0 % time, +1.00 GiB; compute mapping mlp -> none'

    Args:
        settings: the settings of the runner-up's step; empty if they equal the best candidate's.
    """
    mesh = "same mesh" if other.mesh == best.mesh else f"mesh {mesh_text(other.mesh)}"
    parts = (
        f"runner-up: {mesh}, {_difference_text(best, other.seconds, other.peak_bytes)}",
        _changes_text("compute mapping", best.assignment.compute, other.assignment.compute),
        _changes_text("param mapping", best.params, other.params),
        settings,
    )
    return "; ".join(filter(None, parts))


def describe_attention(
    best: Candidate, layers: Mapping[str, str], devices: int, alternatives: Mapping[str, Iterable[Alternative]]
) -> list[str]:
    """Describe how each kind of attention is computed, then what its alternatives would cost, the fastest first.

    >>> from types import SimpleNamespace
    >>> from shardplan.plan.attention_plan import AttentionPlan
    >>> best = SimpleNamespace(assignment=SimpleNamespace(attention=AttentionPlan("ring", 1, 4, "zigzag")))
    >>> describe_attention(best, {"causal": "all 32 layers"}, 4, {})
    ['sequence sharded over 4 devices; keys and values pass around a ring of 4, zigzag order']

    Args:
        layers: name of each kind of attention in the model -> its layers, in words; where there are several kinds,
            sentences name them.
        devices: the number of devices that the sequence is sharded over; 1 only with Native Sparse Attention.
        alternatives: name of each kind of attention that has any -> its other methods.
    """
    attention = best.assignment.attention
    sentences = []
    for kind, where in layers.items():
        method = attention.of(kind)
        strategy = STRATEGIES[method.strategy].format(ring=method.ring, ulysses=method.ulysses)
        of_kind = f" in {where}: {kind}" if len(layers) > 1 else ""
        if isinstance(method.kernel, SparseKernel):
            sentences.append(f"{SPARSE_METHODS[method.kernel]}{of_kind}")
        if devices > 1:
            sentences.append(f"sequence sharded over {devices} devices; {strategy}, {method.layout} order{of_kind}")
    for kind, methods in alternatives.items():
        of_kind = f" for {kind}" if len(layers) > 1 else ""
        sentences.append(f"other attention methods{of_kind}, by time: {_alternatives_text(best, methods)}")
    return sentences


def method_name(method: AttentionMethod, devices: int) -> str:
    """Return the name of a method of attention, with the order of positions if several devices share the sequence.

    >>> method_name(AttentionMethod("ring", "zigzag", "dense_mask"), devices=4)
    'ring zigzag dense_mask'
    """
    sharded = (method.strategy, method.order) if devices > 1 else ()
    return " ".join(filter(None, (*sharded, method.sparse_kernel)))


def describe_unsharded_heads(axes: Iterable[str]) -> list[str]:
    """Explain why axes of Native Sparse Attention are never sharded in computations.

    >>> describe_unsharded_heads(["q_heads_per_group"])
    ['excluded: q_heads_per_group in computations: the heads of a group select blocks by one sum, on one device']
    """
    named = ", ".join(sorted(axes))
    if not named:
        return []
    return [f"excluded: {named} in computations: the heads of a group select blocks by one sum, on one device"]


def describe_sparse_obstacles(obstacles: Iterable[str]) -> list[str]:
    """Explain why no kernels compute Native Sparse Attention, one sentence per reason.

    >>> describe_sparse_obstacles(["they are for TPUs", "they are for TPUs"])
    ['excluded: kernels of native sparse attention: they are for TPUs']
    """
    return [f"excluded: kernels of native sparse attention: {obstacle}" for obstacle in dict.fromkeys(obstacles)]


def describe_training_order(is_training: bool, shards_positions: bool, kinds: Iterable[AttentionKind]) -> list[str]:
    """Explain why Native Sparse Attention trains with one order of positions only; empty for all other steps.

    >>> from shardplan.decoder.parts.attention.sparse.config import NativeSparseConfig
    >>> sparse = AttentionKind(sparse=NativeSparseConfig(2560, 4, 16, 192, 128, 32, 16, 64, 16, 512))
    >>> describe_training_order(is_training=True, shards_positions=True, kinds=[sparse])
    ["excluded: zigzag order in training: Levanter's loss needs tokens in order"]
    """
    if not (is_training and shards_positions and any(kind.sparse is not None for kind in kinds)):
        return []
    return ["excluded: zigzag order in training: Levanter's loss needs tokens in order"]


def describe_experts(best: Candidate, alternatives: Sequence[Alternative]) -> list[str]:
    """Describe how routed experts are computed, then what the alternatives would cost, the fastest first.

    >>> from types import SimpleNamespace
    >>> blocks = [SimpleNamespace(experts="experts", mlp="mlp")]
    >>> space = SimpleNamespace(step=SimpleNamespace(expert_blocks=blocks))
    >>> assignment = SimpleNamespace(experts=SimpleNamespace(strategy=ExpertStrategy.GATHER_TOKENS))
    >>> mesh, compute = {"data": 2, "model": 4}, {"experts": ("model",)}
    >>> describe_experts(SimpleNamespace(space=space, assignment=assignment, mesh=mesh, compute=compute), [])
    ['experts sharded over model (4 devices); devices gather the tokens of their group and scatter the sums']
    """
    sentences = []
    for block in best.space.step.expert_blocks:
        sharded = [
            f"{axis} sharded over {' x '.join(best.compute[axis])} ({mesh_size(best.mesh, best.compute[axis])} devices)"
            for axis in (block.experts, block.mlp)
            if axis in best.compute
        ]
        strategy = EXPERT_STRATEGIES[best.assignment.experts.strategy]
        sentences.append(f"{', '.join(sharded)}; {strategy}" if sharded else "every device computes all experts")
    if alternatives:
        sentences.append(f"other expert strategies, by time: {_alternatives_text(best, alternatives)}")
    return sentences


def describe_uneven_load(best: Candidate, spread: float, seconds: float) -> str:
    """Describe how a given spread of expert loads would change a step of `seconds`.

    >>> from types import SimpleNamespace
    >>> describe_uneven_load(SimpleNamespace(seconds=1.0, peak_bytes=8 * GIB), spread=0.5, seconds=1.2)
    'experts used as unevenly as in trained models (workload.expert_load_spread 0.5): +20.0 % time'
    """
    setting = f"workload.expert_load_spread {spread:g}"
    return f"experts used as unevenly as in trained models ({setting}): {_time_text(best, seconds)} time"


def describe_other_form(best: Candidate, other: OtherForm, param_dtype: str) -> str:
    """Describe the effect of weights in another form: kept as stored, or decoded to `param_dtype`.

    >>> from types import SimpleNamespace
    >>> best = SimpleNamespace(seconds=1.0, peak_bytes=8 * GIB, space=SimpleNamespace(available_bytes=15 * GIB))
    >>> describe_other_form(best, OtherForm("float8_e4m3fn", 0.9, 5 * GIB), "bfloat16")
    'weights kept in float8_e4m3fn instead (load.keep_dtype): -10.0 % time, -3.00 GiB'
    """
    if other.kept_dtype is None:
        form = f"weights in {param_dtype} instead (without load.keep_dtype)"
    else:
        form = f"weights kept in {other.kept_dtype} instead (load.keep_dtype)"
    too_large = "" if other.peak_bytes <= best.space.available_bytes else ", which does not fit"
    return f"{form}: {_difference_text(best, other.seconds, other.peak_bytes)}{too_large}"


def describe_indivisible(examples: Iterable[Indivisible], batch: int) -> list[str]:
    """Explain which logical axes cannot be sharded over mesh axes, in a sentence for each product of mesh axes.

    Args:
        batch: sequences per step; examples with a smaller batch are from microbatches that the search tried.

    >>> over_data = [Indivisible("kv_head", 8, ("data",), 128), Indivisible("batch", 64, ("data",), 128)]
    >>> describe_indivisible([*over_data, Indivisible("experts", 8, ("model",), 16)], batch=256)
    ['experts (8) is not divisible by model = 16', 'kv_head (8), microbatch (64) are not divisible by data = 128']
    """
    axes: dict[str, list[str]] = {}
    for axis, size, mesh_axes, devices in examples:
        name = "microbatch" if axis == BATCH_AXIS and size != batch else axis
        axes.setdefault(f"{' x '.join(mesh_axes)} = {devices}", []).append(f"{name} ({size})")
    return sorted(
        f"{', '.join(sorted(names))} {'are' if len(names) > 1 else 'is'} not divisible by {divisor}"
        for divisor, names in axes.items()
    )


def describe_unknown_axis(axis: str, known: Iterable[str]) -> str:
    """Explain that a given mapping has a logical axis that the model lacks.

    >>> describe_unknown_axis("mpl", ["embed", "mlp"])
    "the model has no axis 'mpl', so that mapping it does nothing; did you mean 'mlp'?"
    """
    return f"the model has no axis {axis!r}, so that mapping it does nothing; {nearest(axis, known)}"


def describe_trace(step: Step) -> list[str]:
    """Describe the parts of the step that its trace could not follow or simplified.

    >>> describe_trace(Step((), (), {}, {}, approximations={"choices between branches, counted as the last branch": 2}))
    ['2 choices between branches, counted as the last branch']
    """
    unnamed = [
        f"{count} results of {primitive} have no logical axes: they count as replicated, and collectives that their "
        "sharding causes are not counted"
        for primitive, count in step.unnamed.items()
    ]
    unpriced = [
        f"{primitive} is not priced: counted as elementwise work, by its bytes, without FLOPs and collectives "
        f"({count} times in the program)"
        for primitive, count in step.unpriced.items()
    ]
    return unnamed + unpriced + [f"{count} {what}" for what, count in step.approximations.items()]


def _changes_text(title: str, before: AxisMapping, after: AxisMapping) -> str:
    """Describe the logical axes that `after` shards differently from `before`; empty if there are none."""
    changed = {axis: after.get(axis, ()) for axis in {**before, **after} if before.get(axis, ()) != after.get(axis, ())}
    return f"{title} {grouped_text(changed)}" if changed else ""


def _difference_text(best: Candidate, seconds: float, peak_bytes: float) -> str:
    """Format the differences of a step of `seconds` and `peak_bytes` from the best candidate."""
    return f"{_time_text(best, seconds)} time, {_memory_text(best, peak_bytes) or 'same memory'}"


def _alternatives_text(best: Candidate, alternatives: Iterable[Alternative]) -> str:
    """Format the differences of steps from the best candidate, the fastest first; memory only where it differs."""
    texts = []
    for name, seconds, peak_bytes in sorted(alternatives, key=lambda each: each.seconds):
        memory = _memory_text(best, peak_bytes)
        texts.append(f"{name} {_time_text(best, seconds)}{f' ({memory})' if memory else ''}")
    return ", ".join(texts)


def _time_text(best: Candidate, seconds: float) -> str:
    """Format the relative difference of a step of `seconds` from the best candidate's."""
    difference = seconds / best.seconds - 1
    return "same" if abs(difference) < NEGLIGIBLE else f"{100 * difference:+.1f} %"


def _memory_text(best: Candidate, peak_bytes: float) -> str:
    """Format the difference of `peak_bytes` from the best candidate's; empty if it would be shown as 0."""
    gib = f"{(peak_bytes - best.peak_bytes) / GIB:+.2f}"
    return f"{gib} GiB" if float(gib) else ""

"""Computes the attention of shardplan's decoder, and of users' own models, as a plan says.

The modules of Levanter's `Attention` are replaced in the model (`shardplan.attention.levanter`). A model without them
calls a function of attention itself, and that call is replaced while the model is traced.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from haliax import NamedArray

# under another name, because it is replaced under its own
from shardplan.attention.dot_product import dot_product_attention as sharded_attention
from shardplan.attention.levanter import has_parallel_modules
from shardplan.errors import ConfigError
from shardplan.model.attention.attention_calls import Arguments, replace_attention
from shardplan.model.gradient_checkpointing.activation_names import context_named_by_kernel
from shardplan.model.registry import Model
from shardplan.plan.attention_plan import KernelName
from shardplan.plan.plan import Plan
from shardplan.positions.sequence_layout import SequenceLayout
from shardplan.positions.sequence_order import SequenceOrder
from shardplan.program.marked.marked_attention import kind_of_call

DECIDED_BY_PLAN = (
    "use_flash", "attn_backend", "flash_block_size", "block", "strategy", "ulysses", "kernel", "hardware",
)  # fmt: skip
"""Arguments that select an attention implementation in a call; the plan overrides them and keeps the others."""


@contextmanager
def planned_attention(model: Model, plan: Plan) -> Iterator[None]:
    """Compute the attention calls of a model by the methods of a plan, unless its attention modules already do so.

    If the plan does not shard positions, a user's own model computes its attention itself.

    Args:
        model: model that `shardplan.execution.specialize.specialize` has returned.

    Raises:
        ConfigError: the plan was edited, and has another order of positions than the sequence.
    """
    if has_parallel_modules(model.template):
        with context_named_by_kernel():
            yield
        return
    if not (plan.attention.is_sequence_parallel or model.is_decoder):
        # of Levanter's own attention, only this kernel can name its context
        uses_splash = plan.attention.kernel == KernelName.SPLASH
        with context_named_by_kernel() if uses_splash else nullcontext():
            yield
        return
    layout: str | SequenceLayout = SequenceOrder.CONTIGUOUS
    if plan.attention.layout != SequenceOrder.CONTIGUOUS and model.is_decoder:
        layout = plan.attention.sequence_layout(plan.workload.position)
    elif plan.attention.layout != SequenceOrder.CONTIGUOUS:
        raise ConfigError(
            f"plan: attention.layout is {plan.attention.layout}, and {type(model.template).__name__} takes positions "
            "in the order of the sequence; make it contiguous, or plan again"
        )

    def compute(arguments: Arguments) -> NamedArray:
        """Compute attention by the plan's method for its kind."""
        method = plan.attention.of(kind_of_call(arguments).name)
        kept = {name: value for name, value in arguments.items() if name not in DECIDED_BY_PLAN}
        return sharded_attention(
            **kept, strategy=method.strategy, ulysses=method.ulysses, kernel=method.kernel, layout=layout
        )

    with replace_attention(compute), context_named_by_kernel():
        yield

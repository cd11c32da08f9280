"""The optimizers of optax that a training step can use, and the shapes of their state.

Options follow the name. `adamw+ema` is adamw that also keeps a moving average of the parameters, as Levanter's
`model_averaging` does; `adamw+mu_bfloat16` stores its first moments in bfloat16 (optax's `mu_dtype`), as many published
runs do, which saves a sixth of the bytes of float32 parameters with their state.
"""

import inspect
from typing import Any

import equinox as eqx
import optax
from haliax import NamedArray

from shardplan.errors import ConfigError, nearest, one_line
from shardplan.model.inspect import named_leaves
from shardplan.plan.workload.dtypes import DTYPES

LEARNING_RATE = 1e-5
EMA_SUFFIX = "+ema"
"""End of the name of an optimizer that also keeps a moving average of the parameters."""
EMA_DECAY = 0.999
MOMENT_OPTIONS = {f"mu_{dtype}": dtype for dtype in DTYPES}
"""Option -> type of first moments."""


def make_optimizer(name: str) -> optax.GradientTransformation:
    """Return the optax optimizer that `name` and its options describe, with a constant learning rate.

    >>> import numpy as np
    >>> make_optimizer("adamw").init(np.ones(2))[0]._fields
    ('count', 'mu', 'nu')
    >>> make_optimizer("adamm")
    Traceback (most recent call last):
        ...
    shardplan.errors.ConfigError: workload.optimizer 'adamm' is not an optimizer of optax; did you mean 'adam'?

    Raises:
        ConfigError: optax has no optimizer of this name that needs only a learning rate, or the optimizer has no such
            option.
    """
    if name.endswith(EMA_SUFFIX):
        return with_average(make_optimizer(name.removesuffix(EMA_SUFFIX)))
    name, plus, option = name.partition("+")
    optimizers = {each: function for each, function in vars(optax).items() if _is_optimizer(each, function)}
    if name not in optimizers:
        raise ConfigError(f"workload.optimizer {name!r} is not an optimizer of optax; {nearest(name, optimizers)}")
    if not plus:
        return optimizers[name](LEARNING_RATE)
    if option not in MOMENT_OPTIONS:
        known = (*MOMENT_OPTIONS, EMA_SUFFIX.removeprefix("+"))
        raise ConfigError(f"workload.optimizer {name}+{option}: {option!r} is no option; {nearest(option, known)}")
    if "mu_dtype" not in inspect.signature(optimizers[name]).parameters:
        raise ConfigError(
            f"workload.optimizer {name}+{option}: {name} of optax has no type of first moments (mu_dtype); leave "
            f"+{option} out, or use adamw"
        )
    return optimizers[name](LEARNING_RATE, mu_dtype=MOMENT_OPTIONS[option])


def with_average(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Extend the state of `optimizer` by a moving average of the parameters after each update.

    >>> import numpy as np
    >>> optimizer = with_average(optax.sgd(1.0))
    >>> updates, (_, average) = optimizer.update(np.ones(2), optimizer.init(np.ones(2)), np.ones(2))
    >>> updates.tolist(), [round(each, 4) for each in average.tolist()]
    ([-1.0, -1.0], [0.999, 0.999])
    """

    def init(parameters: Any) -> tuple[Any, Any]:
        return optimizer.init(parameters), parameters

    def update(gradients: Any, state: tuple[Any, Any], parameters: Any = None) -> tuple[Any, tuple[Any, Any]]:
        inner, average = state
        updates, inner = optimizer.update(gradients, inner, parameters)
        updated = optax.apply_updates(parameters, updates)
        return updates, (inner, optax.incremental_update(updated, average, 1 - EMA_DECAY))

    return optax.GradientTransformation(init, update)


def _is_optimizer(name: str, function: Any) -> bool:
    """Return whether `function` makes an optimizer from only a learning rate."""
    # `scale_by_learning_rate` and others take a learning rate, and are only parts of an optimizer
    if name.startswith(("_", "scale")) or not inspect.isfunction(function):
        return False
    is_required = {each.name: each.default is each.empty for each in inspect.signature(function).parameters.values()}
    return next(iter(is_required), "") == "learning_rate" and not any([*is_required.values()][1:])


def abstract_optimizer_state(transformation: optax.GradientTransformation, parameters: Any) -> Any:
    """Return the state of an optimizer for `parameters`, as a pytree with a `jax.ShapeDtypeStruct` for every array.

    >>> import jax
    >>> state = abstract_optimizer_state(make_optimizer("adamw+mu_bfloat16"), jax.ShapeDtypeStruct((4,), "float32"))
    >>> state[0].mu.shape, str(state[0].mu.dtype), str(state[0].nu.dtype)
    ((4,), 'bfloat16', 'float32')

    Raises:
        ConfigError: the state has a list of arrays in place of a named array, or the update needs more than gradients.
    """
    state = eqx.filter_eval_shape(transformation.init, parameters)
    if any(isinstance(leaf, NamedArray) and not hasattr(leaf.array, "shape") for _, leaf in named_leaves(state)):
        raise ConfigError("workload.optimizer has lists of arrays as state, which no mapping can shard; use another")
    try:
        eqx.filter_eval_shape(transformation.update, parameters, state, parameters)
    except TypeError as error:
        raise ConfigError(f"workload.optimizer needs more than gradients; use another: {one_line(error)}") from error
    return state

"""An identity function that refuses forward-mode derivatives with a message.

The gradient of attention is a `jax.custom_vjp`, which JAX refuses to differentiate forwards in words that do not name
attention. This identity comes before it, and works as `jax.custom_vjp` does: its tangent is the result of a linear
primitive, which reverse mode transposes away. If that is executed after all, the derivative is a forward one.
"""

from typing import Any, NoReturn

from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from shardplan.errors import ConfigError

_identity_p = Primitive("shardplan_reverse_mode_only")
_tangent_p = Primitive("shardplan_reverse_mode_only_tangent")


def refuse_forward_mode(x: Array) -> Array:
    """Return `x`, whose forward-mode derivatives raise a `ConfigError`; reverse mode and forward over reverse work.

    >>> import jax
    >>> jax.grad(lambda x: refuse_forward_mode(x) ** 2)(3.0).item()
    6.0
    """
    result: Array = _identity_p.bind(x)
    return result


def _refuse(*_args: Any, **_params: Any) -> NoReturn:
    raise ConfigError(
        "attention has reverse-mode derivatives only; use jax.grad, jax.vjp or jax.jacrev instead of jax.jvp, "
        "jax.jacfwd or jax.linearize"
    )


def _jvp(primals: tuple[Array], tangents: tuple[Any]) -> tuple[Array, Any]:
    # the primal value without the identity: derivatives of gradients, forward ones too, are not refused
    tangent = tangents[0]
    return primals[0], tangent if type(tangent) is ad.Zero else _tangent_p.bind(tangent)


_identity_p.def_impl(lambda x: x)
_identity_p.def_abstract_eval(lambda x: x)
batching.defvectorized(_identity_p)
ad.primitive_jvps[_identity_p] = _jvp
mlir.register_lowering(_identity_p, lambda _, x: [x])

_tangent_p.def_impl(_refuse)
_tangent_p.def_abstract_eval(lambda tangent: tangent)
ad.deflinear2(_tangent_p, lambda cotangent, _: [cotangent])
batching.primitive_batchers[_tangent_p] = _refuse
mlir.register_lowering(_tangent_p, _refuse)

"""Functions that something else computes within a context: a trace marks their calls, and a plan gives them a method.

A context variable has what computes the function, so that a context replaces it in its own thread alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import update_wrapper


class Replaceable[**Parameters, Result]:
    """A function whose implementation can be replaced within a context; also usable as a decorator.

    >>> double = Replaceable(lambda x: 2 * x)
    >>> with double.replaced_by(lambda x: f"twice {x}"):
    ...     double(3)
    'twice 3'
    >>> double(3)
    6
    """

    def __init__(self, compute: Callable[Parameters, Result]) -> None:
        """Make a replaceable function whose default implementation is `compute`."""
        update_wrapper(self, compute)
        self._compute: ContextVar[Callable[Parameters, Result]] = ContextVar(compute.__qualname__, default=compute)

    def __call__(self, *arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        """Call the replacement if there is one, else the default implementation."""
        return self._compute.get()(*arguments, **named)

    @contextmanager
    def replaced_by(self, compute: Callable[Parameters, Result]) -> Iterator[None]:
        """Replace the implementation by `compute` within the context."""
        token = self._compute.set(compute)
        try:
            yield
        finally:
            self._compute.reset(token)

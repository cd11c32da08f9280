"""Differences between step times that do not count when plans are compared."""

TIME_RESOLUTION = 1e-3
"""Relative difference of step times below which plans tie; of tied plans the one with less peak memory wins.

It is what a plan may be slower for the sake of memory. Where ties were within 1%, 405B on v4-256 got a plan that is
6.9% slower as compiled than another candidate, which needs more memory and fits (docs/log.md).
"""
LEFT_OUT = 1e-2
"""Fraction of a step's time by which a plan must be faster to justify mechanisms whose costs the estimate omits.

The loop over blocks of logits takes 0.6% of a step of an 8B model as compiled (docs/log.md), which no estimate has; and
copies to and from the host are hidden in an estimate as well as they can be.
"""

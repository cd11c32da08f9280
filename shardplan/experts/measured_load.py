"""Published measurements of how unevenly tokens are routed to experts.

Source: L. Wang et al. 2024, Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts
(https://arxiv.org/abs/2408.15664), table 2: by how much the busiest of 64 experts exceeds their mean over a validation
set, of models of 1 and of 3 billion parameters.
"""

from statistics import NormalDist, fmean

EXPERTS = 64
EXCESS_WITH_AUXILIARY_LOSS, EXCESS_WITH_CORRECTION = (0.72, 0.52), (0.04, 0.04)
"""(Rows of the busiest expert / mean rows) - 1, for routers balanced by an auxiliary loss, and by corrections of scores
(`shardplan.decoder.parts.mlp.router`)."""


def largest_of_normals(count: float) -> float:
    """Return the expected largest of independent standard normal numbers (Blom's approximation).

    >>> round(largest_of_normals(8), 2)
    1.43
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def measured_load_spread(has_correction: bool) -> float:
    """Return the measured spread of loads: standard deviation / mean of the experts' rows.

    It is computed from the measured load of the busiest expert, assuming normally distributed loads, and rounded to two
    digits.

    >>> measured_load_spread(has_correction=False), measured_load_spread(has_correction=True)
    (0.27, 0.017)
    """
    excess = EXCESS_WITH_CORRECTION if has_correction else EXCESS_WITH_AUXILIARY_LOSS
    return float(f"{fmean(excess) / largest_of_normals(EXPERTS):.2g}")

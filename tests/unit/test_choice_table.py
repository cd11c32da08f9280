"""The bounds over all components against all plans of random tables."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.search.components.keeping import Keeping
from shardplan.search.reasons import Rejection
from shardplan.search.subproblem.choice_table import ChoiceTable, find_possible

ROWS = 3


@st.composite
def problems(draw):
    """A few components with a few choices each, and options about up to two activations; numbers are small integers."""
    sizes = draw(st.lists(st.integers(1, 2), max_size=2))
    options = sum(sizes)
    keeping = Keeping.of(sizes, (), np.zeros(0), np.zeros((options, 0)), np.zeros(options, bool))

    def array(low, high, *shape):
        values = st.integers(low, high)
        count = math.prod(shape)
        return np.array(draw(st.lists(values, min_size=count, max_size=count)), float).reshape(shape)

    tables = []
    for choices in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)):
        seconds = keeping.by_combination(array(5, 9, choices), array(-2, 0, choices, options))
        tables.append(ChoiceTable(seconds, array(5, 9, choices, ROWS), array(-3, 3, choices, options, ROWS)))
    limit = draw(st.one_of(st.just(math.inf), st.integers(0, 9 * len(tables))))
    return tables, keeping, limit, array(4 * len(tables), 10 * len(tables), ROWS)


def all_plans(tables, keeping, limit, available):
    """Every choice per table with every combination of options that is fast enough and fits."""
    for chosen in itertools.product(*(range(len(table.bytes)) for table in tables)):
        for number, combination in enumerate(keeping.combinations):
            seconds, size = 0.0, np.zeros(ROWS)
            for table, i in zip(tables, chosen, strict=True):
                seconds += table.seconds[i, number]
                size += table.bytes[i] + combination @ table.option_bytes[i]
            if seconds <= limit and (size <= available).all():
                yield chosen, number


@pytest.mark.slow
@settings(max_examples=200)
@given(problems())
def test_no_choice_of_a_plan_is_left_out(problem):
    """Nothing that any plan has is left out, and a plan exists only if something is left."""
    tables, keeping, limit, available = problem
    possible = find_possible(tables, keeping, limit, available)
    for chosen, number in all_plans(*problem):
        assert not isinstance(possible, Rejection)
        assert number in possible.combinations
        assert all(i in rows for i, rows in zip(chosen, possible.choices, strict=True))


@given(problems())
def test_one_component_is_decided(problem):
    """With a single choice per component the bounds are exact: what is left are the combinations of plans."""
    tables, keeping, limit, available = problem
    single = [ChoiceTable(*(part[:1] for part in table)) for table in tables]
    possible = find_possible(single, keeping, limit, available)
    expected = [number for _, number in all_plans(single, keeping, limit, available)]
    assert ([] if isinstance(possible, Rejection) else [*possible.combinations]) == expected

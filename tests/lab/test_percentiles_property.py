"""Percentiles against numpy and the standard library."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.percentiles import SHOWN, percentile, spread

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=300)


@given(VALUES, st.floats(0, 1))
def test_a_percentile_is_numpys(values: list[float], share: float) -> None:
    assert percentile(sorted(values), share) == pytest.approx(float(np.quantile(values, share)), rel=1e-9, abs=1e-9)


@given(VALUES)
def test_a_spread_is_what_the_standard_library_says(values: list[float]) -> None:
    found = spread([*values, None])
    assert found.count == len(values)
    assert found.mean == pytest.approx(statistics.fmean(values))
    assert found.p50 == pytest.approx(statistics.median(values))
    assert found.max == max(values)
    for name, share in SHOWN.items():
        assert getattr(found, name) == pytest.approx(float(np.quantile(values, share)), rel=1e-9, abs=1e-9)

"""Gradients after which compressed ones are imprecise are told, and ordinary ones are not."""

from __future__ import annotations

import numpy as np
import pytest

from raytf.training.synchronous import SpikeWatch, imprecise_steps


@pytest.mark.parametrize(
    ("ratio", "shards", "steps"),  # as measured of random values: steps after the spike with an error of a tenth
    [(10, 4, 0), (100, 4, 0), (1e3, 4, 2), (1e4, 4, 6), (1e6, 4, 12), (10, 32, 0), (100, 32, 2), (1e3, 32, 6)],
)
def test_how_long_gradients_stay_imprecise(ratio: float, shards: int, steps: int):
    assert abs(imprecise_steps(ratio, shards) - steps) <= 1
    assert (imprecise_steps(ratio, shards) == 0) == (steps == 0)


def test_a_spike_is_told_once_and_with_how_long_it_lasts():
    watch = SpikeWatch(4)
    norms = np.ones(20)
    assert watch.inspect(1, norms) == []
    (line,) = watch.inspect(21, np.array([1.0, 1e4, 1e4, 1.0]))
    assert line.startswith("the gradients of step 22 are 10,000 times as large as usual. With --compress-gradients")
    assert "about 6 later steps" in line
    assert watch.inspect(25, norms) == []
    assert len(watch.inspect(45, np.array([1e4]))) == 1  # another one


def test_gradients_that_change_slowly_or_are_not_known_are_not_told():
    watch = SpikeWatch(32)
    assert watch.inspect(1, np.geomspace(1e-3, 1e3, 400)) == []
    assert watch.inspect(401, np.full(5, np.nan)) == []
    fresh = SpikeWatch(32)
    assert fresh.inspect(1, np.array([0.0, 1.0, 1e6])) == []  # nothing is usual yet

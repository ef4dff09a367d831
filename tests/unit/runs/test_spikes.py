"""Steps that stand out: found where a value jumps, and seldom where it does not."""

from __future__ import annotations

import numpy as np
import pytest

from raytf.runs import spikes
from raytf.runs.spikes import Spike

RNG = np.random.default_rng(0)


def columns(losses: np.ndarray, norms: np.ndarray | None = None) -> dict[str, np.ndarray]:
    return {
        "step": np.arange(1, len(losses) + 1),
        "loss": losses,
        "gradient_norm": np.full(len(losses), np.nan) if norms is None else norms,
    }


def falling(steps: int, spread: float) -> np.ndarray:
    """Losses as they often are: falling, and spread in proportion."""
    return 2.3 * np.exp(-3 * np.arange(steps) / steps) * np.exp(RNG.normal(size=steps) * spread)


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("at", [50, 51, 77, 499])
def test_a_loss_that_jumps_is_found_at_its_step(spread: float, at: int):
    losses = falling(500, spread)
    losses[at] *= 1e6
    (found,) = spikes.find(columns(losses))
    assert (found.first, found.last, found.outside) == (at + 1, at + 1, ("loss",))
    assert found.values["loss"] == losses[at]
    assert found.usual["loss"] == pytest.approx(np.median(losses[at - 50 - at % 5 : at - at % 5]), rel=0.1)


def test_no_false_alarm_in_a_hundred_thousand_steps():
    losses, norms = falling(100_000, 0.4), np.exp(RNG.normal(size=100_000))
    assert len(spikes.find(columns(losses, norms))) <= 3


def test_losses_below_zero_have_a_band_too():
    losses = -1000 + RNG.normal(size=300)
    losses[200] += 30
    (found,) = spikes.find(columns(losses))
    assert found.first == 201


def test_a_norm_that_jumps_before_the_loss_does_is_one_spike():
    losses, norms = np.full(200, 0.5), np.full(200, 3.0)
    norms[120], losses[121:124] = 400.0, 8.0
    (found,) = spikes.find(columns(losses, norms))
    assert (found.first, found.last, found.outside) == (121, 124, ("loss", "gradient_norm"))
    assert found.values == {"loss": 0.5, "gradient_norm": 400.0}
    assert found.describe("gradient_norm") == "400 (usually 3)"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_no_number_is_a_spike(value: float):
    losses = falling(200, 0.1)
    losses[150] = value
    (found,) = spikes.find(columns(losses))
    assert found.first == 151


def test_norms_that_are_known_only_later_have_a_band_from_there_on():
    losses, norms = falling(400, 0.1), np.full(400, np.nan)
    norms[200:] = 1.0
    norms[300] = 50.0
    (found,) = spikes.find(columns(losses, norms))
    assert (found.first, found.outside) == (301, ("gradient_norm",))


@pytest.mark.parametrize("steps", [0, 1, 49, 50])
def test_a_short_run_has_none(steps: int):
    assert spikes.find(columns(np.full(steps, 1.0))) == []


def test_the_command_can_be_pasted():
    spike = Spike(7, 9, ("loss",), {"loss": 2.0}, {"loss": 0.5})
    assert spike.replayed("s3://b/my runs/a") == "raytf replay 's3://b/my runs/a' --step 7 --dump step-7 -- COMMAND"
    assert spike.height == 4
    assert spike.describe("gradient_norm") == ""

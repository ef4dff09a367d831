"""The versions in `constraints.txt` can be installed by each Python that raytf supports."""

from __future__ import annotations

from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.conftest import ROOT


@pytest.mark.parametrize("python", ["3.11.2", "3.12.3", "3.13.5"], ids=["Debian 12", "Ubuntu 24.04", "Debian 13"])
def test_each_pin_can_be_installed_by_the_python_of_a_distribution(python: str):
    """Where one pin needs a newer Python, pip tries older versions of everything else, for more than 20 minutes."""
    lines = map(Requirement, (ROOT / "constraints.txt").read_text().splitlines())
    pins = [pin for pin in lines if not pin.marker or pin.marker.evaluate({"python_full_version": python})]
    assert len({pin.name for pin in pins}) == len(pins) > 200
    needs = {pin.name: _needs(pin) for pin in pins}
    assert sum(each is not None for each in needs.values()) > 200
    assert [name for name, need in needs.items() if need and python not in SpecifierSet(need)] == []


def _needs(pin: Requirement) -> str | None:
    """The Python that a pinned version needs; None where another version is installed here."""
    try:
        installed = metadata.distribution(pin.name)
    except metadata.PackageNotFoundError:
        return None
    need = installed.metadata.get("Requires-Python") or ">=3"
    return need if installed.version in pin.specifier else None

"""Hosts for tests of clusters; where they are impossible, tests are skipped with the reason."""

from __future__ import annotations

import pytest

from tests.cluster.hosts import reason_not_possible


@pytest.fixture(scope="session")
def hosts_are_possible() -> None:
    """Skips where this machine cannot have hosts."""
    reason = reason_not_possible()
    if reason:
        pytest.skip(reason)

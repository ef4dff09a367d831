"""What every unit test leaves as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_clients_of_other_tests() -> Iterator[None]:
    """Ray keeps AWS clients by region, whatever endpoint they were made for; that of a test ends with it."""
    yield
    utils = sys.modules.get("ray.autoscaler._private.aws.utils")
    if utils is not None:
        utils.client_cache.cache_clear()
        utils.resource_cache.cache_clear()

"""What every unit test leaves as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


def forget_clients() -> None:
    """Ray keeps AWS clients for the life of a process, with the endpoint of whichever test was first."""
    utils, config = (sys.modules.get(f"ray.autoscaler._private.aws.{name}") for name in ("utils", "config"))
    if utils is not None:
        utils.client_cache.cache_clear()
        utils.resource_cache.cache_clear()
    if config is not None:
        config._get_subnets_or_die.cache_clear()


@pytest.fixture(autouse=True)
def no_clients_of_other_tests() -> Iterator[None]:
    """Those of a test end with it."""
    yield
    forget_clients()

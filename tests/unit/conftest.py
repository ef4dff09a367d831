"""What every unit test leaves as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from raytf.storage import s3 as stores
from raytf.storage.storage import Storage
from raytf.testing import StorageProxy


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


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[StorageProxy]:
    """Before the S3 server, for stores that lack something. What is found out about such a one ends with the test."""
    before = stores.set_checksums(None)
    with StorageProxy(s3_endpoint) as proxy:
        yield proxy
    stores.set_checksums(before)


@pytest.fixture
def behind(s3: Callable[..., str], s3_endpoint: str, proxy: StorageProxy) -> Storage:
    """A bucket that is reached through `proxy`."""
    return Storage(s3("runs").replace(s3_endpoint, proxy.endpoint))

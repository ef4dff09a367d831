"""The token with which a Ray admits its clients, and whether it requires one."""

from __future__ import annotations

import os

import grpc
from ray._private import services
from ray._private.authentication import authentication_token_setup
from ray._raylet import Config  # type: ignore[attr-defined]
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

#: Environment variable in which a user chooses whether a token is used.
MODE = authentication_token_setup.AUTH_MODE_ENV_VAR


def gcs_of(address: str) -> str | None:
    """Return HOST:PORT of the GCS that an address means; None if it means none, or if there is no Ray.

    Args:
        address: as `ray.init` takes it, such as `auto`.
    """
    if "://" in address:
        return None
    try:
        return services.canonicalize_bootstrap_address(address)
    except (ValueError, ConnectionError):
        return None


def is_let_in(gcs: str, token: str, seconds: float = 5.0) -> bool | None:
    """Return whether a Ray accepts a token; None if it cannot be asked.

    Args:
        gcs: HOST:PORT.
        token: empty for none.
        seconds: to wait for the answer.
    """
    metadata = (("authorization", f"Bearer {token}"),) if token else None
    with grpc.insecure_channel(gcs) as channel:
        stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        request = getattr(gcs_service_pb2, "CheckAliveRequest")()  # generated code, of which mypy knows no names  # noqa: B009
        try:
            stub.CheckAlive(request, timeout=seconds, metadata=metadata)
        except grpc.RpcError as error:
            return False if error.code() is grpc.StatusCode.UNAUTHENTICATED else None
    return True


def use() -> None:
    """Have this process, and those that it starts, show the user's token from now on."""
    os.environ[MODE] = "token"
    Config.initialize("")

"""Errors of Azure's libraries in the words that `refusals.classify` knows."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any


class ContainerMissingError(OSError):
    """There is no such container in the account."""


@contextlib.contextmanager
def explained(what: str, path: str = "", hand_on: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Give errors of Azure's libraries the words that `refusals.classify` knows.

    Args:
        what: is done, as the service calls it.
        path: CONTAINER/NAME.
        hand_on: errors that stay as they are.
    """
    from azure.core import exceptions

    try:
        yield
    except hand_on:
        raise
    except OSError:
        raise
    except exceptions.ResourceNotFoundError as error:
        if "ContainerNotFound" in (code := _code(error)) or not path.partition("/")[2]:
            name = path.partition("/")[0]
            raise ContainerMissingError(f"Azure Error {code or 'ContainerNotFound'}: no container {name}") from error
        raise FileNotFoundError(errno.ENOENT, "there is no such blob", path) from error
    except exceptions.ClientAuthenticationError as error:
        raise OSError(f"No credentials that Azure takes during {what}: {error.message}") from error
    except exceptions.HttpResponseError as error:
        raise OSError(
            f"Azure Error {_code(error)} during {what}: {error.message} (HTTP status {error.status_code})"
        ) from error
    except exceptions.AzureError as error:  # no answer came
        raise OSError(f"Azure Error NETWORK_CONNECTION during {what}: {error}") from error
    except ValueError as error:  # a connection string or a key that cannot be read
        raise OSError(f"No credentials that can be read during {what}: {error}") from error


def _code(error: Any) -> str:
    return str(getattr(error.error_code, "value", error.error_code) or "") if hasattr(error, "error_code") else ""

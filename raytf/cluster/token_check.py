"""Whether a Ray lets this user in: asked before Ray's own client tries, for half a minute and without a word of why."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum

from raytf._ray import tokens
from raytf.cluster import local_ray
from raytf.errors import ClusterError

_THERE = "the head's token in ~/.ray/auth_token, or name its file in RAY_AUTH_TOKEN_PATH"
_FIX = f"Type `export RAY_AUTH_MODE=token`, and have {_THERE}."


class Entry(Enum):
    """How a Ray is entered."""

    AS_ASKED = "as the environment says"
    WITH_TOKEN = "with the user's token, which the environment leaves open"


def decide(address: str, mode: str | None, token: str, is_let_in: Callable[[str], bool | None]) -> Entry:
    """Decide how to enter.

    Args:
        address: of the cluster, for people.
        mode: RAY_AUTH_MODE; None if it is not set.
        token: that the user has; empty for none.
        is_let_in: asks with a token, or with none; see `tokens.is_let_in`.

    Raises:
        ClusterError: the cluster wants a token, or another one.
    """
    is_on = (mode or "").lower() == "token"
    if is_let_in(token if is_on else "") is not False:
        return Entry.AS_ASKED
    if is_on:
        why = "does not take this token" if token else "wants a token, and there is none here"
        raise ClusterError(f"the Ray at {address} {why}. Have {_THERE}.")
    if mode is not None:
        raise ClusterError(f"the Ray at {address} wants a token, and RAY_AUTH_MODE is {mode}. {_FIX}")
    if not token or is_let_in(token) is False:
        why = "the one here is another one" if token else "there is none here"
        raise ClusterError(f"the Ray at {address} wants a token, and {why}. {_FIX}")
    return Entry.WITH_TOKEN


def let_in(address: str) -> None:
    """Use the token of this user where a Ray wants one and RAY_AUTH_MODE does not say.

    Args:
        address: as `ray.init` takes it.

    Raises:
        ClusterError: see `decide`.
    """
    gcs = tokens.gcs_of(address)
    if gcs is None:
        return
    entry = decide(address, os.environ.get(tokens.MODE), local_ray.token(), lambda token: tokens.is_let_in(gcs, token))
    if entry is Entry.WITH_TOKEN:
        tokens.use()

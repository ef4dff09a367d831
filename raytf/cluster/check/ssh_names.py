"""Names of hosts and users that a file may give to ssh."""

from __future__ import annotations

import re

#: What ssh takes for an option, or a shell of the user's own configuration (%h) for more than a name, is not a host.
_HOST = re.compile(r"[A-Za-z0-9_:\[][A-Za-z0-9._:%\[\]-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+\\-]*")


def is_host(name: object) -> bool:
    """Whether it may be an address or a host's name, and nothing else to ssh or a shell."""
    return _HOST.fullmatch(str(name)) is not None


def is_user(name: object) -> bool:
    """Whether it may be the name of a user, and nothing else to ssh or a shell."""
    return _USER.fullmatch(str(name)) is not None

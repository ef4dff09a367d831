"""Take everything after `--` on a command line as the one text that a flag takes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def rest_as(flag: str, args: Sequence[str]) -> list[str]:
    """Return the arguments with everything after `--` as the value of a flag."""
    own = list(args)
    if "--" not in own:
        return own
    at = own.index("--")
    return [*own[:at], f"--{flag}={shlex.join(own[at + 1 :])}"]

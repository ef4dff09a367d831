"""Whether what a file wants to be run on this machine may be run: somebody is asked, where there is somebody."""

from __future__ import annotations

import sys

from raytf.config.terminal_text import say
from raytf.doctor.clouds import ssh_hosts
from raytf.doctor.document import Platform, parse, place_of


def trusted(text: str, name: str) -> bool:
    """Ask at a terminal about the command that a file names as the way to its hosts; no, where there is no terminal.

    Args:
        text: of the file.
        name: of the file.
    """
    documents, _ = parse(text)
    document = documents[0] if documents else None
    command = "" if document is None or place_of(document) is not Platform.HOSTS else ssh_hosts.proxy_of(document)
    if not command or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    say(f"{name} wants to run on this machine, to reach its hosts: {command}", sys.stderr)
    print("Run it? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().casefold() in ("y", "yes")

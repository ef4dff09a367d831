"""`raytf ui [STORAGE]`: show the runs of a storage as live pages in a browser."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from dataclasses import dataclass

import tyro

from raytf.commands._places import USUAL, answering
from raytf.config.terminal_text import say
from raytf.errors import ConfigError, not_installed
from raytf.runs import ui_address

PORT = 8787
#: Number of ports to try if none is set.
_TRIES = 20
#: Seconds between two reads of the list of runs, from a folder and from an object store, which charges for each read.
_LIST_SECONDS, _STORE_SECONDS = 1.0, 5.0
#: Minimum number of characters of a token.
_TOKEN = 16


@dataclass(frozen=True)
class Ui:
    """Show the runs of a storage in a browser, live: curves, speed, events. The pages are read-only."""

    storage: tyro.conf.Positional[str] = USUAL
    """Where runs are kept: a folder, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX."""
    host: str = "127.0.0.1"
    """Address to listen on; any other than this machine's loopback requires a token."""
    port: int | None = None
    """Port to listen on; by default 8787, or the next free one."""
    token: str | None = None
    """Text of 16 or more characters that a browser passes once, as ?token=TEXT."""


def main(flags: Ui) -> None:
    """Run the command."""
    if flags.token is not None and len(flags.token) < _TOKEN:
        raise ConfigError(f"--token has {len(flags.token)} characters. Expected {_TOKEN} or more.")
    if flags.token is None and not is_loopback(flags.host):
        raise ConfigError(
            f"--host {flags.host}: anybody who reaches this machine could read the runs. Pass a --token of {_TOKEN} "
            "characters or more, or leave --host out and forward the port with `ssh -L`."
        )
    storage = answering(flags.storage)
    # The default folder may not exist before the first run; any other folder was typed and must exist.
    if storage.is_local and flags.storage != USUAL and not os.path.isdir(storage.uri):
        raise ConfigError(f"there is no folder {storage.uri}. Expected the storage of runs, such as {USUAL}.")
    try:
        from raytf.ui.app import serve  # starlette is not needed for --help
    except ImportError as error:
        raise not_installed("raytf ui", "ui", error.name) from error
    listener = listen(flags.host, flags.port)
    port = listener.getsockname()[1]
    shown = f"[{flags.host}]" if ":" in flags.host else flags.host
    url = f"http://{shown}:{port}/"
    say(f"the runs in {storage.locate('')}: {url}{'' if flags.token is None else f'?token={flags.token}'}")
    say("Press Ctrl-C to stop")
    over = threading.Event()
    try:
        with ui_address.announced(url, storage.uri):
            serve(storage, listener, flags.token, _LIST_SECONDS if storage.is_local else _STORE_SECONDS, over)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("raytf ui has stopped") from None
    finally:
        over.set()


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int | None) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: the port is in use, or the address does not exist.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    wanted = [port] if port is not None else [*range(PORT, PORT + _TRIES), 0]
    for number in wanted:
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((host, number))
            made.listen(64)
        except (OSError, OverflowError) as error:
            made.close()
            if number is wanted[-1]:
                why = getattr(error, "strerror", None) or error
                raise ConfigError(
                    f"cannot listen at {host}:{number}: {why}. Choose another --port or --host."
                ) from error
            continue
        return made
    raise AssertionError(wanted)

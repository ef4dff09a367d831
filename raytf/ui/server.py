"""Runs the pages' server until somebody ends it."""

from __future__ import annotations

import logging
import socket
import threading

import uvicorn

from raytf.inference.serving import connections
from raytf.inference.serving.limits import ServingLimits
from raytf.storage.storage import Storage
from raytf.ui import app
from raytf.ui.gallery import Gallery, keep_fresh

#: Seconds that streams may take to end with the server.
_END_SECONDS = 1


def serve(
    storage: Storage, listener: socket.socket, token: str | None, list_seconds: float, over: threading.Event
) -> None:
    """Serve the runs of a storage.

    Args:
        storage: in which they are.
        listener: a socket that listens.
        token: see `app.make`.
        list_seconds: between two looks at the list.
        over: set when it should end.

    Raises:
        StorageError: storage refuses.
        KeyboardInterrupt: Ctrl-C.
    """
    gallery = Gallery(storage)
    gallery.refresh()
    threading.Thread(target=keep_fresh, args=(gallery, list_seconds, over), daemon=True, name="raytf-list").start()
    config = uvicorn.Config(
        app.make(gallery, token),
        http=connections.bounded(ServingLimits()),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_END_SECONDS,
    )
    _Server(config).run(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn's server, which does not report the streams of open pages as failed requests when it shuts down."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await super().shutdown(sockets)

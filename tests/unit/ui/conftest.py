"""A server of `raytf ui` for tests, and a browser that looks at it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from raytf.commands.ui import listen
from raytf.storage.storage import Storage
from raytf.ui import app
from raytf.ui.gallery import Gallery, keep_fresh
from tests.cluster import browser


@pytest.fixture
def serving() -> Iterator[Callable[..., str]]:
    """serving(storage, token=None): the address of its pages, without a slash."""
    ends: list[Callable[[], None]] = []

    def serve(storage: Storage, token: str | None = None) -> str:
        gallery, over, listener = Gallery(storage), threading.Event(), listen("127.0.0.1", 0)
        gallery.refresh()
        config = uvicorn.Config(app.make(gallery, token), log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        threads = [
            threading.Thread(target=keep_fresh, args=(gallery, 0.3, over), daemon=True),
            threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True),
        ]
        for thread in threads:
            thread.start()

        def end() -> None:
            over.set()
            server.should_exit = True
            for thread in threads:
                thread.join(30)

        ends.append(end)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield serve
    for end in ends:
        end()


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., list[Any]]:
    """look(*steps): what a headless Chromium sees; see `tests.cluster.browser`."""
    if shutil.which("chromium") is None:
        pytest.skip("there is no chromium (Debian's package chromium)")

    return lambda *steps: browser.look(list(steps), tmp_path)

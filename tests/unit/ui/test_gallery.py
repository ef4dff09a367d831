"""How often the pages ask an object store, which is paid for each request: of what has ended, once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raytf.runs import ledger
from raytf.runs.lease import Lease
from raytf.storage.storage import Storage
from raytf.testing import StorageProxy
from raytf.ui.gallery import Gallery
from tests.support.runs import Script, a_run, add_result, add_steps


@pytest.fixture
def counted(proxy: StorageProxy) -> Callable[[Callable[[], object]], int]:
    """counted(call): how many requests a call makes."""
    proxy.fail_share(1e-300)  # none in practice; the proxy counts requests while a share of them is to fail

    def count(call: Callable[[], object]) -> int:
        before = proxy.requests
        call()
        return proxy.requests - before

    return count


def test_an_open_page_of_a_finished_run_asks_the_store_for_nothing(behind: Storage, counted):
    run, gallery = a_run().write(behind.child("first").uri), Gallery(behind)
    add_steps(run, lambda step: 1 / step, 10)
    add_result(run)
    gallery.refresh()
    drawn = gallery.page("first")
    assert counted(lambda: [gallery.mark("first") for _ in range(20)]) == 0
    assert counted(lambda: gallery.page("first")) == 0
    assert counted(gallery.refresh) == 1  # the list of all files
    book = ledger.Ledger(run, "b")  # it is trained further
    book.add(Script().at(200, "driver", state="started").events)
    book.flush()
    gallery.refresh()
    assert gallery.mark("first") != drawn.mark
    assert gallery.page("first") is not drawn


def test_an_open_page_of_a_live_run_asks_for_one_small_object_a_second(behind: Storage, counted):
    now = [0.0]
    run = Script().at(0, "driver", state="started").trains(10, 100, True).write(behind.child("a").uri)
    book, gallery = ledger.Ledger(run, "a"), Gallery(behind, lambda: now[0])
    with Lease(run):
        gallery.refresh()
        drawn, mark = gallery.page("a"), gallery.mark("a")
        assert "100" in drawn.main
        now[0] = 1.5
        assert counted(lambda: [gallery.mark("a") for _ in range(20)]) == 1  # several pages of the run share it
        book.sign(Script().trains(20, 777).events[0])
        now[0] = 2.9
        heads = []
        assert counted(lambda: heads.append(gallery.head("a"))) == 1
        assert "777" in heads[0].main
        assert heads[0].mark.splitlines()[0] == mark.splitlines()[0]
        assert heads[0].mark != mark
        book.add(Script().trains(30, 888).events)
        book.flush()
        book.sign(Script().trains(31, 889).events[0])
        now[0] = 6.0  # the driver lives, so its files are listed again
        assert gallery.mark("a").splitlines()[0] != mark.splitlines()[0]
        assert "889" in gallery.page("a").main
    gallery.refresh()
    assert gallery.page("a").title != drawn.title  # its driver is gone


def test_pages_are_drawn_of_signs_of_life_that_are_none(tmp_path):
    run = a_run().write(str(tmp_path / "a"))
    gallery = Gallery(Storage(str(tmp_path)))
    with Lease(run):
        gallery.refresh()
        for sign in (b"", b"[]", b"{", b"\xff", b'{"time": NaN, "kind": 1}', b"[" * 5000, b"x" * (2 << 20)):
            run.put("ledger/live.json", sign)
            assert "1,000" in gallery.head("a").main
            assert "1,000" in gallery.page("a").main

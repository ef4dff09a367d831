"""A rank sees that its keeper has freed its memory, which is needed by later workers now."""

from __future__ import annotations

import os
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from raytf.checkpoint.keeper_client import KeeperClient
from raytf.checkpoint.memory_keeper import ReservedSlots
from raytf.checkpoint.slot_ledger import SlotRequest


@pytest.mark.parametrize("freed", [(), (0,), (1,), (0, 1)])
def test_memory_is_lost_once_one_of_its_slots_is_freed(freed):
    """The slot with the newest copy stays for later workers, and must not be written over."""
    files = [os.memfd_create("slot") for _ in range(2)]
    asking: Future[tuple[Any, ReservedSlots]] = Future()
    paths = tuple(f"/proc/{os.getpid()}/fd/{file}" for file in files)
    asking.set_result((SimpleNamespace(), ReservedSlots(paths)))
    monitor: Any = None
    client = KeeperClient("run", SlotRequest("attempt", 0, 1, 100), monitor, clock=lambda: 0.0)
    client._asking = asking
    assert client.take() == ReservedSlots(paths)
    client.look()
    assert not client.is_lost
    for number in freed:
        os.close(files[number])
    other = os.memfd_create("slot")  # gets the descriptor of one that was closed
    client.look()
    assert client.is_lost == bool(freed)
    for file in {*files, other} - {files[number] for number in freed if files[number] != other}:
        os.close(file)

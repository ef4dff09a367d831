"""What a group goes on from where the copies in memory are of weights on which the ranks did not agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytf.checkpoint import manifest, naming
from raytf.checkpoint.durable import DurableTier, Keep
from raytf.checkpoint.invalidated_states import VoidStates
from raytf.checkpoint.manifest import Checkpoint, CheckpointDocument
from raytf.checkpoint.naming import GroupAttempt, name_of, split_name
from raytf.checkpoint.restore import Candidate, RestorePlan, Restorer
from raytf.checkpoint.slot_ledger import Generation
from raytf.distributed.step_agreement import bits_of
from raytf.errors import StorageError
from raytf.storage.storage import Storage

ATTEMPT, LATER = "20260101T000000.000-aaaaaa", "20260102T000000.000-bbbbbb"
A, B = "20260101T000000-aaaaaa", "20260101T000009-000000"


class Memory:
    """Two copies, of steps 20 and 10, with the hash that this rank's node has of each."""

    def __init__(self, hashes: dict[int, int | None]):
        self.hashes = hashes

    def candidates(self) -> list[Generation]:
        return [Generation(step, ATTEMPT, {"node": []}) for step in self.hashes]

    def load(self, generation: Generation) -> Checkpoint:
        value = self.hashes[generation.step]
        document = CheckpointDocument(weights_hash=value)
        return Checkpoint("memory of 2 nodes", generation.step, document, {}, is_in_memory=True)


class TwoRanks:
    """Rank 0, and another one that has read a copy with some hash."""

    rank, world_size = 0, 2

    def __init__(self, others: list[int]):
        self.others = others

    def sum(self, values: np.ndarray) -> np.ndarray:
        return values + np.append(np.float32(1), bits_of(self.others.pop(0)))

    def share(self, data: bytes) -> bytes:
        return data


@pytest.mark.parametrize(
    ("own", "others", "step"),
    [
        ({20: 7, 10: 5}, [7], 20),
        ({20: 7, 10: 5}, [8, 5], 10),
        ({20: None, 10: 5}, [0], 20),  # a copy of an earlier raytf
    ],
)
def test_a_copy_on_whose_weights_the_ranks_did_not_agree_is_skipped(tmp_path: Path, own: Any, others: Any, step: int):
    said: list[str] = []
    durable = DurableTier(Storage(str(tmp_path)), GroupAttempt("20260102T000000.000-bbbbbb"), Keep(3), said.append)
    restorer = Restorer(Memory(own), durable, TwoRanks(others), said.append)  # type: ignore[arg-type]
    restorer.begin(0)
    found = restorer.find(lambda checkpoint: None)
    assert found is not None
    assert found.step == step
    assert said == ([] if step == 20 else ["a snapshot is skipped: the ranks did not agree on its weights"])


def test_invalid_states_are_skipped_in_memory_and_deleted_on_storage(tmp_path: Path):
    said: list[str] = []
    storage = Storage(str(tmp_path))
    for step, attempt in ((5, ATTEMPT), (15, ATTEMPT), (15, LATER)):
        manifest.write(storage, naming.name_of(step, attempt, 1), step, [], {})
    states = VoidStates().and_after(12, [ATTEMPT])
    durable = DurableTier(storage, GroupAttempt("20260103T000000.000-cccccc"), Keep(3), said.append)
    restorer = Restorer(Memory({20: 7, 10: 5}), durable, TwoRanks([5]), said.append, states)  # type: ignore[arg-type]
    restorer.begin(None)
    assert [name for name in restorer._plan.candidates if isinstance(name, str)] == [
        naming.name_of(15, LATER, 1),
        naming.name_of(5, ATTEMPT, 1),
    ]
    assert [each.step for each in restorer._plan.candidates if not isinstance(each, str)] == [10]
    assert [naming.split_name(name)[0] for name in manifest.list_complete(storage)] == [15, 5]
    (line,) = said
    assert line.endswith("is deleted: a machine that took part in it computed wrongly")


class Refusing(DurableTier):
    """Storage that refuses to list checkpoints."""

    def candidates(self) -> list[str]:
        raise StorageError("storage is out", "unreachable")


def test_if_storage_refuses_memory_counts_if_it_is_as_new_as_what_was_known(tmp_path: Path):
    def restorer() -> Restorer:
        durable = Refusing(Storage(str(tmp_path)), GroupAttempt(LATER), Keep(3), lambda text: None)
        return Restorer(Memory({20: 7, 10: 5}), durable, TwoRanks([7]), lambda text: None)  # type: ignore[arg-type]

    one = restorer()
    one.begin(15, is_saving=True)
    found = one.find(lambda checkpoint: None)
    assert found is not None
    assert found.step == 20
    with pytest.raises(StorageError):
        restorer().begin(30, is_saving=True)
    with pytest.raises(StorageError):
        restorer().begin(None)


# -- test restore plan -------------------------------------------------------------------------------------------------


def copies(*steps: int) -> list[Generation]:
    return [Generation(step, A, {}) for step in steps]


def told(candidates: tuple[Candidate, ...]) -> str:
    return " ".join(f"S{split_name(c)[0]}" if isinstance(c, str) else f"M{c.step}" for c in candidates)


@pytest.mark.parametrize(
    ("memory", "known", "is_saving", "stored", "first", "asks", "can_wait", "then"),
    [
        ([8, 6], 4, False, [4], "M8 M6", False, True, None),
        ([8, 4, 2], 4, False, [4], "M8 M4", False, True, None),
        # A commit was under way: step 8 is on storage, and the driver has not heard of it.
        ([6, 4], 4, True, [8, 4], "M6 M4", True, True, "S8 M6 M4 S4"),
        ([6, 4], 4, True, [4], "M6 M4", True, True, "M6 M4 S4"),
        # Storage is known to have a later step than memory.
        ([6], 8, False, [8, 4], "", True, False, "S8 M6 S4"),
        ([6], 8, True, [12, 8], "", True, False, "S12 S8 M6"),
        ([], 0, False, [], "", True, False, ""),
        # A new driver knows nothing.
        ([6], None, False, [8], "", True, False, "S8 M6"),
        ([8], None, False, [8], "", True, False, "M8 S8"),
        ([8], 0, False, [], "M8", False, True, None),
    ],
)
def test_the_newest_state_is_first(memory, known, is_saving, stored, first, asks, can_wait, then):
    plan = RestorePlan.of(copies(*memory), known, is_saving)
    assert (told(plan.candidates), plan.asks_storage, plan.can_wait) == (first, asks, can_wait)
    if then is not None:
        listed = plan.listed([name_of(step, A) for step in stored])
        assert told(listed.candidates) == then
        assert not listed.asks_storage


def test_copies_that_cannot_be_read_are_followed_by_storage():
    plan = RestorePlan.of(copies(8, 6, 3), 4, is_saving=False).failed()
    assert plan.asks_storage
    assert told(plan.listed([name_of(4, A)]).candidates) == "S4 M3"


def test_candidates_are_the_latest_steps_of_both_tiers():
    memory = copies(40, 30)
    names = [name_of(50, A), name_of(40, B), name_of(40, A), name_of(35, A)]
    # Should the one of step 50 be damaged, what is in memory of step 40 is still later than step 35 on storage.
    listed = RestorePlan.of(memory, None, is_saving=False).listed(names[::-1])
    assert list(listed.candidates) == [names[0], memory[0], *names[1:], memory[1]]

"""Where a run is: what is known to be on storage."""

import pytest

from raytf.checkpoint.manifest import Checkpoint, CheckpointDocument
from raytf.checkpoint.training_state import TrainingState
from raytf.distributed.step_digest import GENESIS


@pytest.mark.parametrize(
    ("of_copy", "known", "durable"),
    [(None, None, None), (None, 0, None), (10, None, 10), (10, 30, 30), (30, 10, 30), (None, 40, 40), (10, 50, 10)],
)
def test_a_save_may_have_ended_after_the_copy_in_memory_was_made(of_copy, known, durable):
    chosen = Checkpoint("memory", 40, CheckpointDocument(durable_step=of_copy), {}, is_in_memory=True)
    # What the driver saw on storage of a later step could not be restored, else it would have been.
    assert TrainingState.of(chosen, known).durable_step == durable


def test_a_checkpoint_is_on_storage_and_a_new_run_is_not():
    assert TrainingState.of(Checkpoint("x", 40, CheckpointDocument(), {}), None).durable_step == 40
    assert TrainingState.of(None, 0) == TrainingState()


def test_the_chain_goes_on_where_the_checkpoint_ends():
    document = TrainingState(chain=bytes(range(32))).document({}, 1)
    assert TrainingState.of(Checkpoint("x", 40, document, {}), None).chain == bytes(range(32))
    # One of a raytf that had no chain, which does not begin at the first step.
    assert TrainingState.of(Checkpoint("x", 40, CheckpointDocument(), {}), None).chain == b""
    assert TrainingState().chain == GENESIS

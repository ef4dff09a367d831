"""What a state needs of a node and of a device: tables, and laws that hold for any numbers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.distributed.memory_needs import DEVICE_SPARE, NODE_SPARE, MemoryNeeds, held, may_hold, refusal

GB = 10**9
#: 350 M weights with Adam, on one worker with a GPU.
LARGE = MemoryNeeds(1_400_000_000, 2_800_000_000, 4_200_000_000, 200_000_000, 1, False, True, False)


@pytest.mark.parametrize(
    ("free", "size", "may"),
    [
        (60 * GB, 4 * GB, True),
        (4 * GB, 4 * GB, False),  # not a byte would be left
        (4 * GB + DEVICE_SPARE, 4 * GB, True),
        (4 * GB + DEVICE_SPARE - 1, 4 * GB, False),
        (None, 1, False),
    ],
)
def test_values_are_held_on_a_device_that_has_memory_for_them(free, size, may):
    assert may_hold(free, size) is may


def test_two_slots_one_share_and_two_tensors():
    assert LARGE.total == 2 * LARGE.state + LARGE.share + 2 * LARGE.largest == 13_000_000_000
    assert replace(LARGE, has_slots=False).total == LARGE.share + 2 * LARGE.largest
    assert replace(LARGE, keeps_best=True).total == LARGE.total + LARGE.share
    on_cpu = replace(LARGE, is_on_host=True, ranks=2, share=2_100_000_000)
    assert on_cpu.total == 2 * LARGE.state + 2 * (LARGE.state + 2_100_000_000)
    assert LARGE.text() == (
        "the state takes 4.2 GB (1.4 GB of weights, 2.8 GB of the optimizer and others); host memory for it on a node "
        "of 1 worker: 13.0 GB (8.4 GB for two copies in memory, 4.6 GB for a checkpoint on the way to storage)"
    )


@pytest.mark.parametrize(
    ("needs", "node", "wants", "told"),
    [
        (LARGE, 16 * GB, True, None),
        (LARGE, 13 * GB, False, None),  # without copies in memory, as their keeper says
        (LARGE, 13 * GB, True, ["--snapshot-every-steps 0", "13.0 GB", "nodes with more memory"]),
        (LARGE, 5 * GB, False, ["4.6 GB for a checkpoint", "a node has 5.0 GB", "more --workers"]),
        (replace(LARGE, keeps_best=True, ranks=2), 8 * GB, False, ["leave out --keep-best", "fewer workers per node"]),
    ],
)
def test_what_cannot_fit_is_refused_with_numbers_and_what_helps(needs, node, wants, told):
    text = refusal(needs, node, wants)
    if told is None:
        assert text is None
    else:
        assert all(part in text for part in told), text
        assert ("--snapshot" in text) == (wants and needs.rest <= node - NODE_SPARE)


@given(
    st.builds(MemoryNeeds, *[st.integers(0, 10**12)] * 4, st.integers(1, 16), *[st.booleans()] * 3),
    st.integers(0, 10**13),
)
def test_what_fits_is_never_refused_and_what_does_not_always(needs, node):
    room = node - NODE_SPARE
    for wants in (False, True):
        fits = (needs.total if wants else needs.rest) <= room
        assert (refusal(needs, node, wants) is None) == fits


@pytest.mark.parametrize(
    ("ranks", "keeps_best", "times"),
    [(1, False, 2), (1, True, 3), (2, False, 1), (2, True, 1.5), (4, True, 1)],  # the whole state at least
)
def test_a_device_may_hold_one_copy_for_each_destination(ranks, keeps_best, times):
    assert held(4 * GB, ranks, keeps_best) == times * 4 * GB

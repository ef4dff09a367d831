"""Which offer is taken when others are empty, and what is remembered: no cloud, no clock but our own."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.cluster.providers import capacity
from raytf.cluster.providers.capacity import (
    LONG_SECONDS,
    CapacityOffer,
    EmptyPools,
    NoCapacity,
    Shortage,
    obtain,
    together,
)

A1, A2, B1, B2 = (CapacityOffer(machine, place) for machine in ("a", "b") for place in ("1", "2"))
SOON, QUOTA = Shortage("Insufficient"), Shortage("Quota", everywhere=True)


class World:
    """A cloud with so much of each offer, and a clock."""

    def __init__(self, has: dict[CapacityOffer, int], shortage: Shortage = SOON, hold: float = 60.0):
        self.has, self.shortage, self.now = dict(has), shortage, 0.0
        self.empty = EmptyPools(hold, lambda: self.now)
        self.launched: list[str] = []
        self.asked: list[str] = []
        self.said: list[str] = []

    def launch(self, offer: CapacityOffer, count: int) -> dict[str, None]:
        self.asked.append(str(offer))
        given = min(count, self.has.get(offer, 0))
        self.has[offer] = self.has.get(offer, 0) - given
        nodes = {f"{offer} {len(self.launched) + i}": None for i in range(given)}
        self.launched += nodes
        if not given:
            raise NoCapacity(self.shortage, "there is none")
        return nodes

    def obtain(self, offers: list[CapacityOffer], count: int) -> list[str]:
        self.asked = []
        room = {offer.machine: math.inf if offer.at_most is None else offer.at_most for offer in offers}
        return list(obtain(offers, count, self.launch, self.empty, lambda o: room[o.machine], self.said.append))


@pytest.mark.parametrize(
    ("has", "count", "asked", "got"),
    [
        ({A1: 9}, 2, ["a in 1"], 2),
        ({A2: 9}, 2, ["a in 1", "a in 2"], 2),
        ({B1: 9}, 2, ["a in 1", "a in 2", "b in 1"], 2),
        ({A1: 1, B2: 1}, 2, ["a in 1", "a in 2", "b in 1", "b in 2"], 2),
        ({A1: 1}, 3, ["a in 1", "a in 2", "b in 1", "b in 2"], 1),
    ],
)
def test_offers_are_tried_in_order_until_there_are_enough(has, count, asked, got):
    world = World(has)
    assert len(world.obtain([A1, A2, B1, B2], count)) == got
    assert world.asked == asked


@pytest.mark.parametrize(
    ("shortage", "asked_at_once", "held_seconds"),
    [
        (SOON, ["a in 1", "a in 2", "b in 1"], 60.0),
        (QUOTA, ["a in 1", "b in 1"], 60.0),
        (Shortage("Unsupported", lasting=True), ["a in 1", "a in 2", "b in 1"], LONG_SECONDS),
    ],
)
def test_what_was_empty_is_not_asked_until_its_time_is_over(shortage, asked_at_once, held_seconds):
    world = World({B1: 9}, shortage)
    world.obtain([A1, A2, B1], 1)
    assert world.asked == asked_at_once
    world.has[A1] = 9
    world.now = held_seconds - 1
    world.obtain([A1, A2, B1], 1)
    assert world.asked == ["b in 1"]
    world.now = held_seconds + 1
    world.obtain([A1, A2, B1], 1)
    assert world.asked == ["a in 1"]


def test_with_nothing_anywhere_it_says_so_once_and_asks_nobody_meanwhile():
    world = World({})
    with pytest.raises(NoCapacity, match=r"no capacity anywhere; asked again in 60 s: a in 1 \(Insufficient\), b in 1"):
        world.obtain([A1, B1], 1)
    assert world.said[-1].startswith("no capacity anywhere")
    said, world.now = list(world.said), 10.0
    with pytest.raises(NoCapacity, match="asked again in 50 s"):
        world.obtain([A1, B1], 1)
    assert (world.asked, world.said) == ([], said)


#: Machines with and without a market, in two zones.
SPOT_1, SPOT_2, OTHER_1, PAID_1 = (
    CapacityOffer(machine, zone, kind=kind)
    for machine, zone, kind in (
        ("g6 spot", "1", "g6"),
        ("g6 spot", "2", "g6"),
        ("g5 spot", "1", "g5"),
        ("g6", "1", "g6"),
    )
)


@pytest.mark.parametrize(
    ("places", "kinds", "left"),
    [
        ([], [], [SPOT_1, SPOT_2, OTHER_1, PAID_1]),
        (["1"], ["g6"], [SPOT_1, PAID_1]),
        (["2", "2", "1"], ["g6"] * 3, [SPOT_2]),
        (["1"], [], [SPOT_1, OTHER_1, PAID_1]),  # the one that runs is of another node type
        (["9"], ["g6"], [SPOT_1, SPOT_2, OTHER_1, PAID_1]),  # of a zone that the config has no more
    ],
)
def test_nodes_stay_together(places, kinds, left):
    offers = [SPOT_1, SPOT_2, OTHER_1, PAID_1]
    assert together(offers, places, kinds, EmptyPools(60.0, lambda: 0.0)) == left


def test_other_places_are_tried_after_15_minutes_without_capacity_nearby():
    world, offers = World({SPOT_2: 9}), [SPOT_1, SPOT_2, OTHER_1, PAID_1]
    full = {PAID_1}

    def tried() -> list[CapacityOffer]:
        return together(offers, ["1"], ["g6"], world.empty, lambda o: 0 if o in full else math.inf)

    beside = [SPOT_1, PAID_1]
    for world.now in (0.0, 300.0, 600.0, LONG_SECONDS - 1):
        assert tried() == beside
        with pytest.raises(NoCapacity, match="no capacity beside them"):
            obtain([SPOT_1], 1, world.launch, world.empty, lambda o: 1, world.said.append, False, "beside them")
    world.now = LONG_SECONDS
    assert tried() == [*beside, SPOT_2, OTHER_1]  # of the same kind first
    # While there is room for the last machine on demand, that is asked first.
    full.clear()
    assert tried() == beside
    full.add(PAID_1)
    # It has some again; and nobody asked for long.
    world.has[SPOT_1], world.now = 9, LONG_SECONDS + 100
    world.obtain([SPOT_1], 1)
    assert tried() == beside
    world.has[SPOT_1], world.now = 0, 2000.0
    with pytest.raises(NoCapacity):
        world.obtain([SPOT_1], 1)
    world.now = 9000.0
    assert tried() == beside


def test_nodes_of_one_request_stay_together_too():
    world = World({SPOT_1: 1, SPOT_2: 9, OTHER_1: 9, PAID_1: 1})
    nodes = obtain(
        [SPOT_1, SPOT_2, OTHER_1, PAID_1], 4, world.launch, world.empty, lambda o: math.inf, world.said.append, False
    )
    assert len(nodes) == 2
    assert world.asked == ["g6 spot in 1", "g6 in 1"]


def test_where_too_few_could_be_had_is_tried_last_when_they_have_gone():
    world = World({SPOT_1: 1, SPOT_2: 9})
    offers = [SPOT_1, SPOT_2]
    obtain(offers, 4, world.launch, world.empty, lambda o: math.inf, world.said.append, False)
    world.now = 300.0  # they have been idle, and are gone
    assert together(offers, [], [], world.empty) == [SPOT_2, SPOT_1]
    world.now = LONG_SECONDS + 1
    assert together(offers, [], [], world.empty) == offers


def test_at_most_so_many_of_a_machine_in_all_places_together():
    few = [CapacityOffer("a", "1", at_most=3), CapacityOffer("a", "2", at_most=3)]
    world = World({few[0]: 2, few[1]: 9})
    assert len(world.obtain(few, 5)) == 3
    with pytest.raises(NoCapacity, match="no more are allowed"):
        obtain(few, 1, world.launch, world.empty, lambda offer: 0, world.said.append)


def test_another_error_is_not_swallowed_and_nothing_else_is_tried():
    asked = []

    def launch(offer, count):
        asked.append(offer)
        raise PermissionError("no")

    with pytest.raises(PermissionError):
        obtain([A1, B1], 1, launch, EmptyPools(1.0, lambda: 0.0), lambda offer: math.inf, print)
    assert asked == [A1]


def test_nodes_that_were_launched_are_told_of_when_a_later_offer_fails():
    world = World({A1: 1})

    def launch(offer, count):
        if offer == B1:
            raise PermissionError("not authorized")
        return world.launch(offer, count)

    got = obtain([A1, B1], 3, launch, world.empty, lambda offer: math.inf, world.said.append)
    assert list(got) == world.launched
    assert world.said[-1] == "1 of 3 started; b in 1 failed: not authorized"


@given(
    has=st.dictionaries(st.sampled_from([A1, A2, B1, B2]), st.integers(0, 4)),
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    pause=st.floats(0.0, 200.0),
    shortage=st.sampled_from([SOON, QUOTA]),
)
def test_never_more_than_was_asked_for_and_all_that_there_is(has, counts, pause, shortage):
    world = World(has, shortage)
    for count in counts:
        before, there = len(world.launched), sum(world.has.values())
        held = [offer for offer in (A1, A2, B1, B2) if world.empty.seconds(offer) > 0]
        try:
            nodes = world.obtain([A1, A2, B1, B2], count)
        except NoCapacity:
            nodes = []
        # What the caller gets is what was launched, each once.
        assert world.launched[before:] == nodes
        assert len(set(world.launched)) == len(world.launched)
        assert len(nodes) <= count
        assert not {str(offer) for offer in held} & set(world.asked)
        assert len(world.asked) == len(set(world.asked))
        if not held and shortage is SOON:
            assert len(nodes) == min(count, there)
        world.now += pause


@pytest.mark.parametrize(
    ("found", "code", "everywhere", "lasting"),
    [
        (capacity.aws_shortage("InsufficientInstanceCapacity"), "InsufficientInstanceCapacity", False, False),
        (capacity.aws_shortage("SpotMaxPriceTooLow"), "SpotMaxPriceTooLow", False, False),
        (capacity.aws_shortage("MaxSpotInstanceCountExceeded"), "MaxSpotInstanceCountExceeded", True, False),
        (capacity.aws_shortage("VcpuLimitExceeded"), "VcpuLimitExceeded", True, False),
        (capacity.aws_shortage("Unsupported"), "Unsupported", False, True),
        (
            capacity.gcp_shortage(
                "{'errors': [{'code': 'ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS', 'message': 'The zone ... does not "
                "have enough resources available to fulfill the request'}]}"
            ),
            "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
            False,
            False,
        ),
        (capacity.gcp_shortage("{'errors': [{'code': 'QUOTA_EXCEEDED'}]}"), "QUOTA_EXCEEDED", True, False),
        (
            capacity.gcp_shortage("Machine type with name 'g2-standard-4' does not exist in zone 'us-central1-f'."),
            "does not exist in zone",
            False,
            True,
        ),
        (
            capacity.azure_shortage("(DeploymentFailed) ... (SkuNotAvailable) The requested VM size"),
            "SkuNotAvailable",
            False,
            True,
        ),
        (
            capacity.azure_shortage("No available zones for VM size Standard_T4"),
            "No available zones for VM size",
            False,
            True,
        ),
        (capacity.azure_shortage('{"code":"ZonalAllocationFailed"}'), "ZonalAllocationFailed", False, False),
        (capacity.azure_shortage("AllocationFailed"), "AllocationFailed", False, False),
        (capacity.azure_shortage("OverconstrainedAllocationRequest"), "OverconstrainedAllocationRequest", False, False),
        (
            capacity.azure_shortage(
                "OperationNotAllowed: ... results in exceeding approved standardNCASv3Family Cores quota."
            ),
            "exceeding approved standardNCASv3Family Cores quota",
            True,
            False,
        ),
    ],
)
def test_the_clouds_words_for_a_shortage(found, code, everywhere, lasting):
    assert found == Shortage(code, everywhere, lasting)


@pytest.mark.parametrize("code", ["UnauthorizedOperation", "RequestLimitExceeded", "InvalidParameterValue", ""])
def test_other_errors_are_none(code):
    assert capacity.aws_shortage(code) is capacity.gcp_shortage(code) is capacity.azure_shortage(code) is None


class Detail:
    def __init__(self, code, message="", details=()):
        self.code, self.message, self.details = code, message, details


class Failed(Exception):
    """As azure.core.exceptions.HttpResponseError, which says less in its text than in `error`."""

    error = Detail("DeploymentFailed", "see details", [Detail("Conflict", '{"error":{"code":"AllocationFailed"}}')])


def test_what_an_error_says_below_its_text_is_read():
    found = capacity.azure_shortage(
        capacity.text_of(Failed("(DeploymentFailed) At least one resource deployment operation failed."))
    )
    assert found == Shortage("AllocationFailed")

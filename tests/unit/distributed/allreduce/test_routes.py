"""Which path gradients take: a table of what ranks may say of their places."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.distributed.allreduce.routes import RankSeat, SumPath, choose, needs_cluster, without_gpu
from raytf.errors import ConfigError


def seat(place: str, promised: float | None = None) -> RankSeat:
    """`a` is a CPU of host a, `a0` a GPU of it, `aMIG-0` a part of one."""
    host, gpu = place[0], place[1:]
    identity = gpu if gpu.startswith("MIG-") else f"GPU-{place}"
    given = float(bool(gpu)) if promised is None else promised
    return RankSeat(host, place, f"node-{host}", given, identity if gpu else None, "NVIDIA L4" if gpu else "")


#: Places of ranks, and for auto, host, ring, nccl: the path, or words of why it cannot be.
TABLE = [
    ("a a", "cpu", "host", "ring", "the workers have none"),
    ("a b c", "cpu", "host", "ring", "the workers have none"),
    ("a0 a1", "nccl", "host", "ring", "nccl"),
    ("a0 b0", "nccl", "host", "ring", "nccl"),
    ("a0 a1 b0 b1", "nccl", "host", "ring", "nccl"),
    ("a0 a0", "host", "host", "ring", "2 workers share one GPU of node-a, which NCCL refuses"),
    ("a0 a1 a1 b0", "host", "host", "ring", "2 workers share one GPU of node-a"),
    ("a0 b0 b0 b0", "host", "host", "ring", "3 workers share one GPU of node-b"),
    ("aMIG-0 aMIG-1", "host", "host", "ring", "node-a offers parts of a GPU (MIG)"),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_the_path_of_each_group(row):
    places, *expected = row
    seats = [seat(place) for place in places.split()]
    for communication, outcome in zip(("auto", "host", "ring", "nccl"), expected, strict=True):
        if outcome in SumPath._value2member_map_:
            assert choose(communication, seats).path is SumPath(outcome)
            continue
        with pytest.raises(ConfigError) as refused:
            choose(communication, seats)
        assert outcome in str(refused.value)
        assert str(refused.value).startswith("--communication nccl: ")
        assert "--communication host" in str(refused.value)


@pytest.mark.parametrize(
    ("communication", "places", "said"),
    [
        ("auto", "a0 b0", "gradients go over NCCL: each of 2 workers has a GPU of its own (2 NVIDIA L4)"),
        ("nccl", "a0 b0", "gradients go over NCCL: --communication nccl"),
        ("ring", "a b", "gradients go over TensorFlow's gRPC ring: --communication ring"),
        (
            "auto",
            "a0 a0",
            "gradients go over the hosts' memory: 2 workers share one GPU of node-a, which NCCL refuses",
        ),
    ],
)
def test_a_line_says_what_was_chosen_and_why(communication, places, said):
    assert str(choose(communication, [seat(place) for place in places.split()])) == said


def test_without_gpus_and_without_a_flag_there_is_nothing_to_say():
    assert choose("auto", [seat("a"), seat("b")]).why == ""


@pytest.mark.parametrize("communication", ["auto", "host", "ring", "nccl"])
def test_cpus_beside_gpus_are_refused(communication):
    with pytest.raises(ConfigError, match=r"rank 1 on node-b computes on a CPU, and others on GPUs: .*--no-use-gpu"):
        choose(communication, [seat("a0"), seat("b"), seat("a1")])


def test_who_lacks_a_promised_gpu_is_known():
    assert without_gpu([seat("a0"), seat("b", 1.0), seat("a1", 0.5), seat("c", 0.5), seat("d")]) == [1, 3]


places = st.builds(
    RankSeat,
    host=st.text("ab", min_size=1, max_size=1),
    token=st.just("t"),
    node=st.text(max_size=200),
    promised=st.sampled_from([0.0, 0.5, 1.0]),
    gpu=st.none() | st.sampled_from(["GPU-0", "GPU-1", "GPU-2", "MIG-3"]),
    kind=st.text(max_size=200),
)


@given(st.lists(places, min_size=2, max_size=6))
def test_nccl_is_taken_only_where_each_has_a_whole_gpu_of_its_own(seats):
    gpus = [each.gpu for each in seats]
    if None in gpus and set(gpus) != {None}:
        return
    apart = None not in gpus and len(set(gpus)) == len(gpus) and "MIG-3" not in gpus
    apart = apart and all(each.promised == 1 for each in seats)
    assert (choose("auto", seats).path is SumPath.NCCL) == apart
    assert (choose("auto", seats).path is SumPath.CPU) == (set(gpus) == {None})


@given(st.sampled_from(["auto", "host", "ring", "nccl"]), st.lists(places, min_size=2, max_size=6))
def test_tensorflows_collectives_need_the_cluster_of_every_rank(communication, seats):
    try:
        path = choose(communication, seats).path
    except ConfigError:
        return
    assert not path.is_collective or all(needs_cluster(communication, each.promised) for each in seats)


def test_a_cluster_is_there_only_for_who_may_need_it():
    assert [needs_cluster("auto", given) for given in (0.0, 0.5, 1.0)] == [False, False, True]
    assert [needs_cluster(way, 0.0) for way in ("host", "ring", "nccl")] == [False, True, True]


@given(places)
def test_a_seat_travels_in_a_kilobyte(one):
    row = one.to_row()
    assert len(row) <= 1024
    again = RankSeat.of_row(row)
    assert (again.host, again.promised, again.gpu) == (one.host, one.promised, one.gpu)
    assert (len(again.node), again.kind.isascii()) == (min(80, len(one.node)), True)

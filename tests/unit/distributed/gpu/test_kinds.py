"""One kind of GPU for a group: which nodes that leaves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.distributed.gpu import kinds

L4, A10G = "L4", "A10G"


def count_of(workers: dict[str, int], most: int = 100):
    return lambda nodes: min(most, sum(workers[node] for node in nodes))


#: Nodes: (kind, workers); most workers; the kind now; whether it stays; the kind that is chosen.
TABLE = [
    ({"a": (L4, 1), "b": (L4, 1), "c": (A10G, 1)}, 9, None, False, L4),
    ({"a": (L4, 1), "b": (L4, 1), "c": (A10G, 4)}, 9, None, False, A10G),
    ({"a": (L4, 1), "b": (L4, 1), "c": (A10G, 4)}, 9, L4, False, A10G),
    ({"a": (L4, 1), "b": (L4, 1), "c": (A10G, 4)}, 9, L4, True, L4),
    ({"a": (L4, 2), "b": (A10G, 2)}, 9, L4, False, L4),
    ({"a": (L4, 2), "b": (A10G, 2)}, 9, A10G, False, A10G),
    ({"a": (L4, 3), "b": (A10G, 8)}, 3, L4, False, L4),
    ({"c": (A10G, 1)}, 9, L4, False, A10G),
    ({"c": (A10G, 1)}, 9, L4, True, L4),
    ({"head": ("", 0), "a": (L4, 1)}, 9, None, False, L4),
    ({"a": ("", 2), "b": ("", 1)}, 9, None, False, ""),
    ({}, 9, None, False, None),
]


@pytest.mark.parametrize(("nodes", "most", "now", "stays", "chosen"), TABLE)
def test_the_kind_that_is_chosen(nodes, most, now, stays, chosen):
    of, workers = ({node: about[i] for node, about in nodes.items()} for i in (0, 1))
    assert kinds.one_kind(of, count_of(workers, most), now, stays) == chosen


@given(
    st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.tuples(st.sampled_from("xyz"), st.integers(0, 4))),
    st.sampled_from([None, "x", "y"]),
)
def test_a_group_has_one_kind_and_no_other_has_room_for_more(nodes, now):
    of, workers = ({node: about[i] for node, about in nodes.items()} for i in (0, 1))
    count = count_of(workers)
    chosen = kinds.nodes_of(of, kinds.one_kind(of, count, now))
    assert len({of[node] for node in chosen}) == bool(nodes)
    assert all(count(chosen) >= count(kinds.nodes_of(of, kind)) for kind in set(of.values()))
    # What was chosen once is chosen again: a group does not go to and fro.
    again = kinds.one_kind(of, count, kinds.one_kind(of, count, now))
    assert kinds.nodes_of(of, again) == chosen


def test_the_kind_is_what_ray_says():
    assert kinds.of_node({"Resources": {"CPU": 8.0, "accelerator_type:A10G": 1.0}, "Labels": {}}) == "A10G"
    assert kinds.of_node({"Resources": {"GPU": 1.0}, "Labels": {"ray.io/accelerator-type": "L4"}}) == "L4"
    assert kinds.of_node({"Resources": {"CPU": 8.0}}) == ""


def test_what_is_said_names_nodes_and_the_flag():
    said = kinds.left_out_text(["b" * 56, "a" * 56], {"a" * 56: "A10G", "b" * 56: ""}, "L4")
    assert said == (
        "left out: aaaaaaaa (A10G), bbbbbbbb (unknown kind). All workers of a group use one kind of GPU, and "
        "the most workers can run on L4; --mixed-gpus uses all nodes"
    )

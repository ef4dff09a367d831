"""Lines that only a worker and its arbiter can write: forged, repeated, left out and sent back ones are noticed."""

from __future__ import annotations

import pytest

from raytf.distributed.membership.arbiter_messages import ARBITER, WORKER, Seal, connection_key, group_key

KEY = bytes(range(32))
LINES = [b'{"wanted":1}\n', b'{"wanted":2}\n', b'{"wanted":3}\n']


def sealed(key: bytes = KEY, sender: str = WORKER) -> list[bytes]:
    seal = Seal(key, sender)
    return [seal.sealed(line) for line in LINES]


def test_lines_are_read_in_the_order_in_which_they_were_written():
    seal = Seal(KEY, WORKER)
    assert [seal.opened(line) for line in sealed()] == LINES


FIRST, SECOND, THIRD = sealed()


@pytest.mark.parametrize(
    "lines",
    [
        [FIRST, FIRST],
        [FIRST, THIRD],
        [SECOND],
        [FIRST.replace(b"1}", b"9}")],
        [LINES[0]],
        [b"\n"],
        [b""],
        [FIRST.upper()],
        [b"\xff" * 40 + b"\n"],
        sealed(sender=ARBITER)[:1],
        sealed(bytes(32))[:1],
    ],
)
def test_any_other_line_is_refused(lines: list[bytes]):
    seal = Seal(KEY, WORKER)
    for line in lines[:-1]:
        seal.opened(line)
    with pytest.raises(ValueError, match="changed, repeated or left out"):
        seal.opened(lines[-1])


def test_keys_depend_on_the_secret_and_on_what_each_side_has_drawn():
    keys = {
        connection_key(secret, name, theirs, own)
        for secret in (KEY, bytes(32))
        for name in ("a", "b")
        for theirs, own in (("1", "2"), ("2", "1"), ("12", ""), ("", "12"))
    }
    assert len(keys) == 16
    groups = {
        group_key(secret, number, members, nonce)
        for secret in (KEY, bytes(32))
        for number in (1, 2)
        for members in (["a", "b"], ["b", "a"], ["ab"])
        for nonce in ("0", "1")
    }
    assert len(groups) == 24
    assert not groups & keys

"""TFRecord framing: what is read is what was written, and what was changed is noticed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.data.sources.tfrecord_files import Damage, find_damage, frame, masked_crc, scan
from tests.support.data_files import framed

records = st.lists(st.binary(max_size=60), max_size=12)


def scanned(data):
    return list(scan(lambda at, n: memoryview(data)[at : at + n], len(data)))


def places(data):
    found = scanned(data)
    return np.array([at + 12 for at, _ in found], np.int64), np.array([len(d) for _, d in found], np.int64)


def test_the_published_check_value():
    """CRC-32C of '123456789' is 0xE3069283 (RFC 3720); masked as TFRecord says."""
    assert masked_crc(b"123456789") == (((0xE3069283 >> 15) | (0xE3069283 << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@given(records)
def test_frames_are_those_of_another_writer(given_records):
    assert frame(given_records) == framed(given_records)


@given(records)
def test_a_scan_gives_what_was_framed(given_records):
    assert [bytes(data) for _, data in scanned(frame(given_records))] == given_records


@given(records.filter(any), st.data())
def test_a_flipped_bit_is_always_noticed_and_costs_one_record(given_records, data):
    whole = bytearray(frame(given_records))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    found = scanned(bytes(whole))
    assert any(isinstance(f, Damage) for f in found)
    good = [bytes(f[1]) for f in found if not isinstance(f, Damage)]
    assert len(good) >= len(given_records) - 1
    assert all(g in given_records for g in good)


@given(records.filter(any), st.data())
def test_a_file_that_is_cut_off_is_noticed_or_ends_between_records(given_records, data):
    whole = frame(given_records)
    cut = data.draw(st.integers(0, len(whole) - 1))
    found = scanned(whole[:cut])
    between = [len(frame(given_records[:i])) for i in range(len(given_records) + 1)]
    assert any(isinstance(f, Damage) for f in found) == (cut not in between)


@given(records.filter(any), st.data())
def test_random_access_notices_a_flipped_bit(given_records, data):
    whole = frame(given_records)
    starts, lengths = places(whole)
    assert find_damage(np.frombuffer(whole, np.uint8), starts, lengths) is None
    changed = np.frombuffer(whole, np.uint8).copy()
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    changed[bit // 8] ^= 1 << bit % 8
    struck = int(np.searchsorted(starts - 12, bit // 8, side="right") - 1)
    found = find_damage(changed, starts, lengths)
    assert found is not None
    assert found[0] == struck


def test_after_damage_of_a_length_the_next_record_is_found_again():
    whole = bytearray(frame([b"a" * 50, b"b" * 50, b"c" * 50]))
    whole[66 + 2] ^= 0xFF
    (at, first), damage, (_, last) = scanned(bytes(whole))
    assert (at, bytes(first), bytes(last)) == (0, b"a" * 50, b"c" * 50)
    assert damage == Damage(1, 66, "the length does not match its CRC-32C")


@pytest.mark.parametrize(("cut", "why"), [(70, "fewer than a record's header"), (100, "a record of 50 bytes begins")])
def test_how_a_file_was_cut_is_told(cut, why):
    damage = scanned(frame([b"a" * 50, b"b" * 50])[:cut])[-1]
    assert (damage.record, damage.offset) == (1, 66)
    assert why in damage.why


def test_lengths_that_the_index_has_otherwise_are_noticed():
    data = np.frombuffer(frame([b"abc", b"defg"]), np.uint8)
    starts, lengths = places(data.tobytes())
    assert find_damage(data, starts, lengths + 1) == (0, "its length is not the one in the index")
    assert find_damage(data, starts[:0], lengths[:0]) is None

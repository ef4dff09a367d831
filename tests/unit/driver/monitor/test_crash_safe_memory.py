"""Bytes that outlive the process that writes them, though it is killed in the middle."""

import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from raytf.driver.monitor import actor

WRITER = """
    import pickle, sys
    known = pickle.load(sys.stdin.buffer)
    number = int.from_bytes((known.read() or b"")[:4], "big")
    print("ready", flush=True)
    while True:
        number += 1
        known.write(number.to_bytes(4, "big") + bytes([number % 251]) * (number * 7919 % 3_000_000))
"""


def test_a_writer_killed_again_and_again_leaves_its_last_write_whole(tmp_path: Path):
    script = tmp_path / "writer.py"
    script.write_text(textwrap.dedent(WRITER))
    chance, last = random.Random(7), 0
    with actor.held() as known:
        for _ in range(8):
            writer = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            try:
                writer.stdin.write(pickle.dumps(known))
                writer.stdin.close()
                assert writer.stdout.readline() == b"ready\n"
                written = known.read()
                while known.read() == written:
                    pass
                for _ in range(chance.randrange(2000)):
                    pass
            finally:
                os.kill(writer.pid, signal.SIGKILL)
                writer.wait(60)
                writer.stdout.close()
            data = known.read()
            number = int.from_bytes(data[:4], "big")
            assert number > last
            assert data[4:] == bytes([number % 251]) * (number * 7919 % 3_000_000)
            last = number


def test_nothing_is_known_before_the_first_write_or_left_after_the_statement():
    with actor.held() as known:
        assert known.read() is None
        known.write(b"one")
        known.write(b"")
        assert known.read() == b""
    with pytest.raises(OSError, match="No such file"):
        known.read()

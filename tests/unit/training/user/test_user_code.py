"""What cannot be sent to a worker does not keep the rest from being sent, and is itself again in the program."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ray import cloudpickle

from raytf.errors import ConfigError
from raytf.training.user.user_code import Parcel, opened, packed

USE = """
import io, sys
from ray import cloudpickle
value = cloudpickle.load(open(sys.argv[1], "rb")).get()
try:
    value["use"](value)
except Exception as error:
    print(type(error).__name__, error)
"""


class Encoded(io.TextIOWrapper):
    """As pytest's EncodedFile: a stream that stands for a standard one."""


def elsewhere(tmp_path: Path, value: dict, use) -> tuple[str, str]:
    """What `use(value)` prints and writes to standard error in another process."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        (tmp_path / "value").write_bytes(cloudpickle.dumps(Parcel(value | {"use": use})))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    command = [sys.executable, "-c", USE, str(tmp_path / "value")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_standard_stream_is_the_one_of_the_process_that_uses_it(tmp_path: Path):
    def use(value):
        caught = io.StringIO()
        with contextlib.redirect_stdout(caught):
            value["out"].write("to what stands there now")
        print(caught.getvalue(), file=sys.stdout)
        print("and to standard error", file=value["err"])

    with contextlib.redirect_stdout(io.StringIO()):
        out, err = elsewhere(tmp_path, {"out": sys.stdout, "err": sys.__stderr__}, use)
    assert out.strip() == "to what stands there now"
    assert "and to standard error" in err


def test_a_program_that_has_replaced_its_stream_by_any_object(tmp_path: Path, monkeypatch):
    class Tee:
        lock = threading.Lock()

        def write(self, text):
            return len(text)

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stdout", Tee())
    out, _ = elsewhere(tmp_path, {"out": sys.stdout}, lambda value: print("seen", file=value["out"]))
    assert out == "seen\n"


@pytest.mark.parametrize(
    ("make", "use", "named"),
    [
        (lambda: (i for i in range(3)), lambda value: next(value["thing"]), "generator"),
        (lambda: (i for i in range(3)), lambda value: list(value["thing"]), "generator"),
        (lambda: Encoded(io.BytesIO()), lambda value: value["thing"].write("x"), "the stream Encoded"),
    ],
)
def test_what_stays_is_named_where_it_is_used(tmp_path: Path, make, use, named):
    thing = make()
    out, _ = elsewhere(tmp_path, {"thing": thing}, lambda value: print("unused"))
    assert out == "unused\n"
    out, _ = elsewhere(tmp_path, {"thing": thing}, use)
    assert out.startswith("ConfigError")
    assert named in out


def test_what_stays_is_listed_before_anything_uses_it():
    parcel = Parcel([(i for i in range(3)), Encoded(io.BytesIO()), sys.stdout])
    cloudpickle.dumps(parcel)
    assert len(parcel.left_behind) == 2
    assert "generator" in parcel.left_behind[0]
    assert parcel.left_behind[1] == "the stream Encoded"


def test_back_in_the_program_they_are_the_objects_that_were_sent():
    generator, stream, lock = (i for i in range(3)), Encoded(io.BytesIO()), threading.RLock()
    back = opened(packed([generator, stream, lock]).body)[0]
    assert back[0] is generator
    assert back[1] is stream
    assert back[2] is lock


def test_a_lock_is_a_new_one_that_works(tmp_path: Path):
    def use(value):
        with value["lock"], value["again"], value["again"]:
            print(value["lock"].locked())

    assert elsewhere(tmp_path, {"lock": threading.Lock(), "again": threading.RLock()}, use)[0] == "True\n"


def test_an_exception_of_any_constructor_can_be_sent():
    class Stopped(OSError):
        def __init__(self, epoch, *, why):
            super().__init__(7, f"at {epoch}")
            self.why = why

    back = opened(packed(Stopped(3, why="because")).body)[0]
    assert (type(back), back.args, back.errno, back.why) == (Stopped, (7, "at 3"), 7, "because")
    plain = opened(packed(FileNotFoundError(2, "no such file", "x.txt")).body)[0]
    assert (plain.errno, plain.filename) == (2, "x.txt")


def test_a_stand_in_says_so():
    from raytf.training.user.user_code import StandIn

    with pytest.raises(ConfigError, match="the generator f, which cannot be sent to a worker and stayed"):
        iter(StandIn("unknown", "the generator f"))

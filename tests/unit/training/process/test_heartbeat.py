"""A heartbeat goes on after an error: a rank that sends none any more looks as if it hung."""

from __future__ import annotations

import threading

from raytf.training.process.heartbeat import keep_calling


class Beats:
    """Counts calls, and stops after so many; `errors` are raised in the calls with their numbers."""

    def __init__(self, most: int, errors: dict[int, Exception]):
        self.stop, self.calls, self.looks = threading.Event(), 0, 0
        self._most, self._errors = most, errors

    def send(self) -> None:
        self.calls += 1
        if self.calls == self._most:
            self.stop.set()
        if self.calls in self._errors:
            raise self._errors[self.calls]

    def look(self) -> None:
        self.looks += 1


def test_errors_end_no_heartbeat_and_the_first_one_is_told():
    told: list[Exception] = []
    errors = {2: OSError("no process"), 3: ValueError("again")}
    beats = Beats(5, dict(errors))
    keep_calling(lambda: [beats.send, beats.look], beats.stop, lambda: False, told.append, 0.0)
    assert (beats.calls, beats.looks) == (5, 5)
    assert told == [errors[2]]


def test_whoever_is_told_may_fail_too():
    def tell(error: Exception) -> None:
        raise error

    beats = Beats(3, {1: OSError("the driver does not answer")})
    keep_calling(lambda: [beats.send], beats.stop, lambda: False, tell, 0.0)
    assert beats.calls == 3


def test_an_error_ends_heartbeats_once_ray_has_shut_down():
    told: list[Exception] = []
    beats = Beats(9, {2: OSError("Ray has shut down")})
    keep_calling(lambda: [beats.send], beats.stop, lambda: True, told.append, 0.0)
    assert (beats.calls, told) == (2, [])

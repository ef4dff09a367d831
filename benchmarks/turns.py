"""Programs that are all there at once and take turns: a block of steps of one, then of the next.

A start of TensorFlow or Ray costs more than what is measured, and a machine's speed changes within minutes. So each
program is started once and waits; `Conductor` lets one after another do a block. A program's ranks call `follow` with
the address that they were given, in whatever process they are, Ray's workers included.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.harness import importable

#: Seconds for a program to start, on a loaded machine, and for a block.
PATIENCE_SECONDS = 600.0


class Conductor:
    """One program with its ranks. A context manager, which ends it.

    Args:
        name: for messages.
        command: which `{address}` in any word becomes the address to follow.
        ranks: how many will call `follow`.
        log: file for what it prints.
        environment: of the program; by default this one's, from which it imports `benchmarks`.
        end_seconds: that it has to end by itself, once it is told.
        host: address of this machine at which ranks call.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        ranks: int,
        log: Path,
        environment: dict[str, str] | None = None,
        end_seconds: float = 30.0,
        host: str = "127.0.0.1",
    ):
        self.name, self._ranks, self._log, self._end_seconds = name, ranks, log, end_seconds
        self._server = socket.create_server((host, 0), backlog=64)
        self._server.settimeout(1.0)
        address = f"{host}:{self._server.getsockname()[1]}"
        words = [word.replace("{address}", address) for word in command]
        with open(log, "w") as out:
            self._process = subprocess.Popen(
                words,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment or importable(),
                start_new_session=True,
            )
        self._files: dict[int, IO[str]] = {}

    @classmethod
    def started(cls, stack: contextlib.ExitStack, *arguments: Any, tries: int = 2) -> Conductor:
        """Return a conductor that all ranks have called, made from `arguments` and ended with the stack.

        A Ray that starts on a loaded machine may give up, so the program is started again where it fails.

        Raises:
            RuntimeError: it did not start this many times.
        """
        while True:
            made = cls(*arguments)
            try:
                made.wait()
                return stack.enter_context(made)
            except BaseException as error:
                made.__exit__()
                tries -= 1
                if not tries or not isinstance(error, RuntimeError):
                    raise

    def __enter__(self) -> Conductor:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.dismiss()
        self._server.close()
        try:
            self._process.wait(timeout=self._end_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()

    def wait(self) -> None:
        """Until all ranks have called.

        Raises:
            RuntimeError: the program ended before, or took too long; tells the end of its log.
        """
        end = time.monotonic() + PATIENCE_SECONDS
        while len(self._files) < self._ranks:
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{self.name} did not start:\n{self._log.read_text()[-3000:]}")
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                continue
            connection.settimeout(PATIENCE_SECONDS)
            file = connection.makefile("rw")
            self._files[json.loads(file.readline())["rank"]] = file

    def run(self, steps: int, **said: Any) -> dict[str, Any]:
        """Have all ranks do this many steps.

        Args:
            steps: of each rank.
            said: what else they must know.

        Returns:
            Rank 0's answer, with `seconds` from the first word to the last answer of all.
        """
        self.wait()
        began = time.perf_counter()
        for file in self._files.values():
            file.write(f"{json.dumps({'steps': steps, **said})}\n")
            file.flush()
        answers = {}
        for rank, file in self._files.items():
            line = file.readline()
            if not line:
                raise RuntimeError(f"rank {rank} of {self.name} has gone:\n{self._log.read_text()[-3000:]}")
            answers[rank] = json.loads(line)
        return answers[0] | {"seconds": time.perf_counter() - began}

    def dismiss(self) -> None:
        """Tell all ranks that all is done, without waiting for their end."""
        for file in self._files.values():
            file.close()

    def rate(self, steps: int, **said: Any) -> float:
        """Return the steps per second over so many steps."""
        return steps / self.run(steps, **said)["seconds"]


def follow(address: str, rank: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of steps to do next, and a dictionary for other results; end when all is done.

    The dictionary begins with what else the conductor has said. The answer has `cpu`, the seconds of CPU time that this
    process has spent on them.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection, connection.makefile("rw") as file:
        file.write(f"{json.dumps({'rank': rank})}\n")
        file.flush()
        for line in file:
            answer: dict[str, Any] = json.loads(line)
            steps, began = answer.pop("steps"), time.process_time()
            yield steps, answer
            answer["cpu"] = time.process_time() - began
            file.write(f"{json.dumps(answer)}\n")
            file.flush()


class Follower:
    """As `follow`, for programs whose loop is not their own: called before each of its steps or calls.

    Args:
        address, rank: as of `follow`.

    Attributes:
        turns: that have begun.
    """

    def __init__(self, address: str, rank: int):
        self._words = follow(address, rank)
        self._left = self.turns = 0

    @property
    def is_between(self) -> bool:
        """Whether no turn is in progress."""
        return self._left <= 0

    def before(self, steps: int) -> bool:
        """Wait for a turn, unless it is one; `steps` will be done now. False when all is done."""
        if self.is_between:
            found = next(self._words, None)
            if found is None:
                return False
            self._left = found[0]
            self.turns += 1
        self._left -= steps
        return True

"""What later worker groups have to know of earlier ones: which states are void, and how long each node was right."""

from __future__ import annotations

from collections.abc import Sequence

#: In place of a process: those of an earlier group.
_GONE = 0


class Past:
    """Kept as long as the driver lives.

    Args:
        void: of the run's folder, as `raytf.checkpoint.void.VoidStates.entries` has them.
    """

    def __init__(self, void: Sequence[tuple[int, Sequence[str]]] = ()):
        self._void = [(after, list(attempts)) for after, attempts in void]
        #: Node -> process -> the step at which it began to train, and that of the latest audit that has agreed with it.
        self._standings: dict[str, dict[int, tuple[int, int]]] = {}

    def go_back(self, after: int, attempts: Sequence[str]) -> None:
        """States after a step, of these attempts, are void."""
        entry = after, list(attempts)
        if entry not in self._void:
            self._void.append(entry)

    def stand(self, node: str, process: int, joined: int, vouched: int) -> None:
        """A process of a node trains since a step, and an audit has agreed with it at another."""
        found = self._standings.setdefault(node, {})
        found.pop(_GONE, None)  # this process has begun with that
        found[process] = (joined, vouched)

    def begin_group(self) -> None:
        """All processes are others from now on, which begin with what is known of their nodes."""
        self._standings = {node: {_GONE: standing} for node, standing in self._worst().items()}

    def told(self) -> tuple[list[tuple[int, list[str]]], dict[str, tuple[int, int]]]:
        """For ranks that begin: void states, and the standing of each node, that of its worst process."""
        return list(self._void), self._worst()

    def _worst(self) -> dict[str, tuple[int, int]]:
        return {
            node: (min(joined for joined, _ in found.values()), min(vouched for _, vouched in found.values()))
            for node, found in self._standings.items()
        }

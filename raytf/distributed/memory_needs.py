"""Computes the memory that a run's state needs: on a node for copies, and on a device for values that are held."""

from __future__ import annotations

from dataclasses import dataclass

#: A device keeps at least this many bytes free for later needs, such as a first validation or fragmentation.
DEVICE_SPARE = 256 << 20
#: A node keeps at least this many bytes free for the system, Ray and the process itself.
NODE_SPARE = 1 << 30


def may_hold(free: int | None, size: int) -> bool:
    """Return whether a device can hold copies of `size` bytes while it trains; False if the free bytes are unknown
    (None). If not, training waits while the state is copied."""
    return free is not None and size + DEVICE_SPARE <= free


def held(state: int, ranks: int, keeps_best: bool) -> int:
    """Return the most bytes of a rank's device that copies of the state, split among the ranks, hold at once: one copy
    on its way to memory, one on its way to storage, and with `--keep-best` one that waits."""
    return max(state, (3 if keeps_best else 2) * state // ranks)


@dataclass(frozen=True)
class MemoryNeeds:
    """Host memory that a run's state needs on one node, in bytes.

    Attributes:
        weights: bytes of the model's variables.
        others: bytes of the rest of the state, such as the optimizer's variables.
        share: bytes of the largest part of a checkpoint that one rank writes.
        largest: bytes of the largest tensor.
        ranks: number of ranks on this node.
        is_on_host: whether the variables are in host memory.
        has_slots: whether the state is copied into the memory of nodes.
        keeps_best: whether a checkpoint with the best value may wait while another one is written.
    """

    weights: int
    others: int
    share: int
    largest: int
    ranks: int
    is_on_host: bool
    has_slots: bool
    keeps_best: bool

    @property
    def state(self) -> int:
        return self.weights + self.others

    @property
    def slots(self) -> int:
        """Bytes of two copies of the state, to which the node's ranks write."""
        return 2 * self.state if self.has_slots else 0

    @property
    def rest(self) -> int:
        """Bytes besides copies in memory: variables (or two tensors in transfer from a device) and checkpoints."""
        variables = self.state if self.is_on_host else 2 * self.largest
        return self.ranks * (variables + self.share * (2 if self.keeps_best else 1))

    @property
    def total(self) -> int:
        return self.slots + self.rest

    def text(self) -> str:
        parts = [f"{_size(self.ranks * self.state)} of variables"] if self.is_on_host else []
        parts += [f"{_size(self.slots)} for two copies in memory"] if self.has_slots else []
        written = self.rest - self.ranks * self.state * self.is_on_host
        parts.append(
            f"{_size(written)} for {'two checkpoints' if self.keeps_best else 'a checkpoint'} on the way to storage"
        )
        workers = f"{self.ranks} worker{'s' if self.ranks > 1 else ''}"
        return (
            f"the state takes {_size(self.state)} ({_size(self.weights)} of weights, {_size(self.others)} of the "
            f"optimizer and others); host memory for it on a node of {workers}: {_size(self.total)} "
            f"({', '.join(parts)})"
        )


def refusal(needs: MemoryNeeds, node_bytes: int, wants_slots: bool) -> str | None:
    """Return why a run cannot start on a node.

    If copies in memory were not requested and do not fit, the run starts without them, and its keeper reports this.

    Args:
        needs: memory needs of the run's state on a node.
        node_bytes: total memory of the node.
        wants_slots: whether the user has requested copies in memory.

    Returns:
        None if the run can start.
    """
    room = node_bytes - NODE_SPARE
    excess = needs.rest > room
    if not excess and (needs.total <= room or not wants_slots):
        return None
    helps = []
    if needs.has_slots and wants_slots and not excess:
        helps.append("--snapshot-every-steps 0 (no copies in memory; a failure costs the steps since a checkpoint)")
    if needs.keeps_best:
        helps.append("leave out --keep-best")
    more = "more --workers, on more nodes, which write smaller shares"
    helps += [more if needs.ranks == 1 else "fewer workers per node", "nodes with more memory"]
    return (
        f"{needs.text()}, but a node has {_size(node_bytes)}, of which {_size(NODE_SPARE)} stay free for other uses. "
        f"Try one of these: {'; '.join(helps)}."
    )


def _size(count: int) -> str:
    if count < 10_000_000:
        return f"{count / 1e6:.1f} MB"
    return f"{count / 1e6:,.0f} MB" if count < 1e9 else f"{count / 1e9:,.1f} GB"

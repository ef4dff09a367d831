"""The path of gradients from rank to rank, chosen from each rank's reported seat. This module loads no TensorFlow.

TensorFlow does not choose it: its `AUTO` is the gRPC ring, even on GPUs, and NCCL is only used on request. NCCL refuses
two ranks on one GPU, and parts of a GPU (MIG). So each rank reports where it computes, and all make the same choice.
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from raytf.config.flags import NCCL_WITHOUT_GPU, Communication
from raytf.errors import ConfigError

#: Prefix of the UUID of a part of a GPU.
_PART = "MIG-"
#: Maximum length of each text in a rank's row, which keeps the row below its size limit.
_LONGEST = 80


class SumPath(enum.Enum):
    """A path on which a vector of gradients is summed over all ranks."""

    CPU = "cpu"  # the path without GPUs: in the memory of each host, and between hosts over TCP
    HOST = "host"  # the same path on request, or for GPUs: copied to the host, summed there, and copied back
    RING = "ring"  # TensorFlow's ring over gRPC, among all ranks
    NCCL = "nccl"  # from GPU to GPU

    @property
    def is_collective(self) -> bool:
        """Whether TensorFlow's collectives, which need its cluster, compute the sum."""
        return self in (SumPath.RING, SumPath.NCCL)


@dataclass(frozen=True)
class RankSeat:
    """The node and devices of a rank, as the rank itself reports them.

    Attributes:
        host: equal for processes that can share memory; unique if this process shares none.
        token: random text that identifies this process.
        node: the name of its machine, for messages.
        promised: how many GPUs Ray assigned to it; a fraction if several ranks share one.
        gpu: the UUID of its GPU; None if TensorFlow computes on the CPU.
        kind: the kind of that GPU, for messages.
    """

    host: str
    token: str
    node: str = ""
    promised: float = 0.0
    gpu: str | None = None
    kind: str = ""

    def to_row(self) -> bytes:
        """Return the seat as JSON, at most a kilobyte."""
        return json.dumps({k: _short(v) if isinstance(v, str) else v for k, v in asdict(self).items()}).encode()

    @classmethod
    def of_row(cls, row: bytes) -> RankSeat:
        return cls(**json.loads(row))


def _short(text: str) -> str:
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:_LONGEST])


@dataclass(frozen=True)
class SumRoute:
    """A path and why it was chosen. The reason is empty if there are no GPUs and the user did not choose the path."""

    path: SumPath
    why: str = ""

    def __str__(self) -> str:
        return f"gradients go {_WAYS[self.path]}: {self.why}"


_WAYS = {
    SumPath.CPU: "over the hosts' memory",
    SumPath.HOST: "over the hosts' memory",
    SumPath.RING: "over TensorFlow's gRPC ring",
    SumPath.NCCL: "over NCCL",
}


def without_gpu(seats: Sequence[RankSeat]) -> list[int]:
    """Return the ranks that were promised a GPU, or a part of one, but have none."""
    return [rank for rank, seat in enumerate(seats) if seat.promised and seat.gpu is None]


def needs_cluster(communication: Communication, promised: float) -> bool:
    """Return whether ranks with `promised` GPUs each may need TensorFlow's own cluster.
    That cluster has to exist before the ranks know each other's seats."""
    return communication in ("ring", "nccl") or (communication == "auto" and promised >= 1)


def choose(communication: Communication, seats: Sequence[RankSeat]) -> SumRoute:
    """Return the path for a group of ranks that have the GPUs they were promised; every rank chooses the same.

    Args:
        communication: the value of `--communication`.
        seats: the seats of all ranks, in rank order.

    Raises:
        ConfigError: NCCL was requested but cannot be used, or some ranks compute on CPUs and others on GPUs.
    """
    is_asked = f"--communication {communication}"
    with_gpu = [seat.gpu for seat in seats if seat.gpu is not None]
    if not with_gpu:
        if communication == "nccl":
            raise ConfigError(NCCL_WITHOUT_GPU)
        why = "" if communication == "auto" else is_asked
        return SumRoute({"auto": SumPath.CPU, "host": SumPath.HOST, "ring": SumPath.RING}[communication], why)
    if len(with_gpu) < len(seats):
        odd = next(rank for rank, seat in enumerate(seats) if seat.gpu is None)
        raise ConfigError(
            f"rank {odd} on {seats[odd].node} computes on a CPU, and others on GPUs: their gradients travel in "
            "different formats. Use a GPU for each worker (--use-gpu), or for none (--no-use-gpu)."
        )
    obstacle = _against_nccl(seats)
    if communication == "nccl" and obstacle:
        raise ConfigError(f"{is_asked}: {obstacle}. Leave it out, or pass --communication host.")
    if communication == "auto":
        return SumRoute(SumPath.HOST, obstacle) if obstacle else SumRoute(SumPath.NCCL, _equipped(with_gpu, seats))
    return SumRoute(SumPath(communication), is_asked)


def _against_nccl(seats: Sequence[RankSeat]) -> str:
    """Return why NCCL cannot sum the gradients of these ranks; empty if it can."""
    gpu, ranks = Counter(seat.gpu for seat in seats).most_common(1)[0]
    if ranks > 1:
        node = next(seat.node for seat in seats if seat.gpu == gpu)
        return f"{ranks} workers share one GPU of {node}, which NCCL refuses"
    share = min(seat.promised for seat in seats)
    if share < 1:
        return f"a worker has {share:g} of a GPU, not a whole one"
    part = next((seat for seat in seats if (seat.gpu or "").startswith(_PART)), None)
    return f"{part.node} offers parts of a GPU (MIG), which NCCL does not support" if part else ""


def _equipped(gpus: Sequence[str], seats: Sequence[RankSeat]) -> str:
    kinds = Counter(seat.kind or "GPU" for seat in seats)
    names = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return f"each of {len(gpus)} workers has a GPU of its own ({names})"

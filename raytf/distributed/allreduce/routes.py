"""The path of gradients from rank to rank, chosen from the seat that each rank reports. It loads no TensorFlow.

TensorFlow leaves this open: its `AUTO` is the ring over gRPC, on GPUs too, and NCCL is only used if it is named; NCCL
refuses two ranks on one GPU, and parts of a GPU (MIG). So each rank says where it computes, and all decide alike.
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
#: Characters of each text in a rank's row, so that the row stays below its size limit.
_LONGEST = 80


class SumPath(enum.Enum):
    """A path on which a vector of gradients is summed over all ranks."""

    CPU = "cpu"  # the path without GPUs: in the memory of each host, and between hosts over TCP
    HOST = "host"  # the same path, but asked for, or for GPUs: copied to the host, summed there, and copied back
    RING = "ring"  # TensorFlow's ring over gRPC, among all ranks
    NCCL = "nccl"  # from GPU to GPU

    @property
    def is_collective(self) -> bool:
        """Whether TensorFlow's collectives add, which need its cluster."""
        return self in (SumPath.RING, SumPath.NCCL)


@dataclass(frozen=True)
class RankSeat:
    """The node and devices of a rank, as the rank itself reports them.

    Attributes:
        host: what processes have in common that can share memory; unique if this one shares none.
        token: random, of this process.
        node: name of its machine, for messages.
        promised: GPUs that the cluster has given it; a fraction where several ranks share one.
        gpu: identifies its GPU (a UUID); None where TensorFlow computes on the CPU.
        kind: of that GPU, for messages.
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
    """The path, and why it was chosen; no reason if there are no GPUs and nothing else was asked for."""

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
    """Return the ranks that were promised a GPU, or a part of one, and have none."""
    return [rank for rank, seat in enumerate(seats) if seat.promised and seat.gpu is None]


def needs_cluster(communication: Communication, promised: float) -> bool:
    """Return whether ranks, promised so many GPUs each, may need TensorFlow's own cluster, which has to exist before
    they know each other's seats."""
    return communication in ("ring", "nccl") or (communication == "auto" and promised >= 1)


def choose(communication: Communication, seats: Sequence[RankSeat]) -> SumRoute:
    """Return the path for a group of ranks that have the GPUs they were promised; every rank chooses the same.

    Args:
        communication: as the user gave it.
        seats: of all ranks, by rank.

    Raises:
        ConfigError: NCCL was asked for where it cannot be used, or some ranks compute on CPUs and others on GPUs.
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
    """Return why NCCL cannot add what these ranks have; empty if it can."""
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

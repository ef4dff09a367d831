"""The ranks' replicas of the weights, which are compared by their hashes with each copy of the state, and repaired.

All ranks apply the same reduced gradient to the same values, so their replicas stay equal. If a replica differs, its
device computes wrongly, or differently from the others. See docs/guides/gpu.md, "Replicas that drift", for the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import google_crc32c
import numpy as np
import tensorflow as tf

from raytf.distributed import step_agreement
from raytf.distributed.encoding.digests import device_sum
from raytf.distributed.group import Ranks
from raytf.distributed.step_agreement import DEVICE_BIT
from raytf.distributed.worker_table import gather
from raytf.errors import ReplicaError

#: Bytes of a state to send at a time.
_PIECE = 64 << 20
#: Bytes to hash at a time, so that other threads get the interpreter in between.
_HASHED_PIECE = 16 << 20


class Replicas:
    """This rank's replica, compared with the other ranks' replicas; every rank must make the same calls.

    Args:
        group: the group of all ranks.
        named: all variables of the state, by name.
        digest: returns the current hash of the weights.
        is_exact: whether the run promises exact bits: if replicas differ, it goes back instead of repairing them.
        say: prints a line for the user; all ranks call it, and only rank 0 prints.
        event: records an event; only rank 0 calls it.
        about: returns this rank's host and device, as text for the user.

    Attributes:
        agreed: the latest step at which all replicas were known to be equal; None before the first.
        compared_step: the step whose hashes the ranks compared last; -1 before the first.
        newest: the hash of the weights in the newest copy.
    """

    def __init__(
        self,
        group: Ranks,
        named: Mapping[str, Any],
        digest: Callable[[], int],
        is_exact: bool,
        say: Callable[[str], None],
        event: Callable[..., None],
        about: Callable[[], str],
    ):
        self._group, self._named, self._digest, self._is_exact = group, named, digest, is_exact
        self._say, self._event, self._about = say, event, about
        #: Step and hash to send next; `_sent` holds those that were sent last.
        self._pending: tuple[int, int] | None = None
        self._sent: tuple[int, int] | None = None
        self._drifts = 0
        self.agreed: int | None = None
        self.compared_step, self.newest = -1, 0

    def hash_weights(self, step: int) -> None:
        """Hash the weights after `step`, whose state is about to be copied."""
        self.newest = self._digest()
        self._pending = (step, self.newest)

    def tell(self) -> int:
        """Return the hash to send to the other ranks with the next vector of flags; 0 for none."""
        self._sent, self._pending = self._pending, None
        return 0 if self._sent is None else self._sent[1]

    def hear(self, sums: np.ndarray, step: int) -> bool:
        """Compare the hashes of all ranks, and repair replicas that differ; return whether any was repaired.

        Args:
            sums: the vectors of flags, summed over all ranks.
            step: the newest step.

        Raises:
            ReplicaError: replicas differ, and there is no majority to copy from, or the run promises exact bits.
        """
        sent, self._sent = self._sent, None
        if sent is None:
            return False
        self.compared_step = sent[0]
        if step_agreement.agree(sums, self._group.world_size):
            self.agreed = sent[0]
            return False
        own = f"{sent[1]:016x} {self._about()}".encode()
        everyone = [each.decode().split(" ", 1) for each in gather(self._group, own)]
        verdict = step_agreement.judge([int(value, 16) for value, _ in everyone])
        if verdict is None:
            return False
        places = [f"rank {rank} ({everyone[rank][1]})" for rank in verdict.apart]
        return self._act(verdict, places, step)

    def _act(self, verdict: step_agreement.ReplicaVerdict, places: Sequence[str], step: int) -> bool:
        where, since = " and ".join(places), "the start" if self.agreed is None else f"step {self.agreed}"
        is_mended = verdict.donor is not None and not self._is_exact
        if verdict.donor is None:
            text = f"the weights of {where} differ at step {self.compared_step}, and no majority shows which are right"
        else:
            others = self._group.world_size - len(verdict.apart)
            text = (
                f"the weights of {where} differ at step {self.compared_step} from those of the other {others} workers"
            )
        fields = {
            "of_step": self.compared_step,
            "from_step": self.agreed,
            "ranks": list(verdict.apart),
            "fixed": is_mended,
        }
        if self._group.rank == 0:
            self._event("replicas", text=text, **fields)
        if not is_mended or verdict.donor is None:
            known = [] if verdict.donor is None else list(verdict.apart)
            raise ReplicaError(f"{text}; the run goes back to the last agreed step", known, self._group.rank)
        self._send(verdict.donor, self._group.rank in verdict.apart)
        self._drifts += 1
        if self._drifts & (self._drifts - 1) == 0:  # a drifting device drifts again and again, so warn ever less often
            again = "" if self._drifts == 1 else f"; {self._drifts} times so far"
            self._say(
                f"WARNING: {text}. They were replaced by the majority's at step {step}. Updates since {since} used "
                f"their gradients{again}. With --exact, the run goes back instead."
            )
        return True

    def _send(self, donor: int, is_apart: bool) -> None:
        """Send the donor's state to the ranks that differ, by tensor; adding integer zeros to it keeps every bit."""
        for variable in self._named.values():
            own = _values(variable)
            raw = own.reshape(-1).view(np.uint8)
            words = np.zeros(-(-raw.size // 4), np.int32)
            if self._group.rank == donor:
                words.view(np.uint8)[: raw.size] = raw
            size = _PIECE // 4
            parts = [self._group.sum(words[a : a + size]) for a in range(0, len(words), size)]
            if is_apart and parts:
                got = np.concatenate(parts).view(np.uint8)[: raw.size]
                variable.assign(got.view(own.dtype).reshape(own.shape))


def _values(variable: Any) -> np.ndarray:
    return np.asarray(variable.value) if hasattr(variable, "value") else np.asarray(variable)


class Digest:
    """The hash of a list of variables.

    On a CPU it is the CRC-32C of the variables' own buffers, for which processors have an instruction. On a GPU it is a
    multilinear hash; see `raytf.distributed.encoding.digests`.

    Args:
        variables: `tf.Variable`s, in the same order on all ranks.
        on_device: whether to compute the hash as on a GPU; by default, if a variable is on another device than a CPU.
    """

    def __init__(self, variables: Sequence[Any], on_device: bool | None = None):
        if on_device is None:
            on_device = any(v.device and "/device:CPU:" not in v.device for v in variables)
        self._on_device = on_device
        self._read = tf.function(lambda: [v.read_value() for v in variables], autograph=False)
        self._sum = tf.function(lambda: device_sum([v.read_value() for v in variables]), autograph=False)

    def value(self) -> int:
        if self._on_device:
            return (int(self._sum().numpy()) & (DEVICE_BIT - 1)) | DEVICE_BIT
        crc = 0
        for value in self._read():
            flat = np.asarray(value).reshape(-1).view(np.uint8)
            for begin in range(0, len(flat), _HASHED_PIECE):
                crc = google_crc32c.extend(crc, flat[begin : begin + _HASHED_PIECE])
        return crc

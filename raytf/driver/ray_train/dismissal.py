"""Tells the arbiter which workers are to leave a group while the others go on; `departures` notes them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from raytf._ray.partial_group import WorkerPlace
from raytf.distributed.arbiter_link import ArbiterAddress, ArbiterLink, worker_name
from raytf.errors import WorkerLostError


def dismiss(arbiter: ArbiterAddress, workers: Sequence[WorkerPlace], after: Sequence[WorkerPlace]) -> None:
    """Have workers leave, once others have come.

    Args:
        arbiter: of the run.
        workers: that are to leave.
        after: workers that must have come before that.
    """
    with contextlib.suppress(WorkerLostError):  # it ends with the driver
        link = ArbiterLink.connect(arbiter, "the controller")
        link.dismiss([worker_name(*each) for each in workers], [worker_name(*each) for each in after])
        link.close()

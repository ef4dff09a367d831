"""What is said of an audit whose two workers have computed other bits."""

from __future__ import annotations

import pytest

from raytf.audit.shard_audit import AuditChoice, AuditVerdict
from raytf.training.auditing import sentence


@pytest.mark.parametrize(
    ("verdict", "says"),
    [
        (AuditVerdict((1,), "does not", is_proven=True), "rank 1 (b) computes wrongly: it does not"),
        (AuditVerdict((1,), "had other records"), "rank 1 (b) had other records"),
        (AuditVerdict((1,), "are others", True), "the weights of rank 1 (b) are others"),
        (AuditVerdict((), "they differ"), "and it is unknown who is right: they differ"),
    ],
)
def test_only_who_was_seen_to_is_said_to_compute_wrongly(verdict: AuditVerdict, says: str):
    text = sentence(8, AuditChoice(2, 0, 1), verdict, ["a", "b"])
    assert text.startswith("step 8, shard 2: ")
    assert text.endswith(says)
    assert ("computes wrongly" in text) == verdict.is_proven

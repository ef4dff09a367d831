"""Which command an application belongs to: what another one serves is never deleted."""

from __future__ import annotations

import pytest

from raytf.inference.serving.application import Found, Hands, hands


@pytest.mark.parametrize(
    ("found", "whose"),
    [
        (None, Hands.GONE),
        (("DELETING", "me"), Hands.GONE),
        (("NOT_STARTED", "other"), Hands.GONE),
        (("RUNNING", "me"), Hands.OURS),
        (("DEPLOYING", "me"), Hands.OURS),
        (("DEPLOY_FAILED", "me"), Hands.OURS),
        (("UNHEALTHY", "me"), Hands.OURS),
        (("DEPLOYING", "other"), Hands.COMING),
        (("RUNNING", "other"), Hands.TAKEN),
        (("UNHEALTHY", "other"), Hands.TAKEN),
        (("RUNNING", ""), Hands.TAKEN),
        (("DEPLOY_FAILED", "other"), Hands.OURS),
    ],
)
def test_whose_an_application_is(found, whose):
    assert hands(found and Found(*found), "me") is whose

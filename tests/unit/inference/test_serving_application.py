"""Which command an application belongs to: what another one serves is never deleted."""

from __future__ import annotations

import pytest

from raytf.inference.serving.application import ApplicationOwner, RunningApplication, owner_of


@pytest.mark.parametrize(
    ("found", "whose"),
    [
        (None, ApplicationOwner.GONE),
        (("DELETING", "me"), ApplicationOwner.GONE),
        (("NOT_STARTED", "other"), ApplicationOwner.GONE),
        (("RUNNING", "me"), ApplicationOwner.OURS),
        (("DEPLOYING", "me"), ApplicationOwner.OURS),
        (("DEPLOY_FAILED", "me"), ApplicationOwner.OURS),
        (("UNHEALTHY", "me"), ApplicationOwner.OURS),
        (("DEPLOYING", "other"), ApplicationOwner.COMING),
        (("RUNNING", "other"), ApplicationOwner.TAKEN),
        (("UNHEALTHY", "other"), ApplicationOwner.TAKEN),
        (("RUNNING", ""), ApplicationOwner.TAKEN),
        (("DEPLOY_FAILED", "other"), ApplicationOwner.OURS),
    ],
)
def test_whose_an_application_is(found, whose):
    assert owner_of(found and RunningApplication(*found), "me") is whose

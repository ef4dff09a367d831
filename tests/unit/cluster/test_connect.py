"""Whether a Ray lets a user in, and what is said where it does not."""

from __future__ import annotations

import pytest

from raytf.cluster.connect import needs_token
from raytf.errors import ClusterError

HEAD = "the head's"


def of(wants: bool):
    return lambda token: not wants or token == HEAD


@pytest.mark.parametrize("mode", [None, "token", "disabled"])
@pytest.mark.parametrize("token", ["", HEAD, "another"])
def test_a_ray_that_wants_none_is_entered_as_the_environment_says(mode, token):
    assert not needs_token("h:1", mode, token, of(wants=False))
    assert not needs_token("h:1", mode, token, lambda token: None), "Ray's own client says what is wrong"


def test_a_ray_that_wants_one_gets_that_of_the_user():
    assert not needs_token("h:1", "token", HEAD, of(wants=True))
    assert not needs_token("h:1", "Token", HEAD, of(wants=True))
    assert needs_token("h:1", None, HEAD, of(wants=True))


@pytest.mark.parametrize(
    ("mode", "token", "said"),
    [
        (None, "", "needs a token, and there is none here. Run `export RAY_AUTH_MODE=token`"),
        (None, "another", "needs a token, and the one here differs. Run "),
        ("token", "", "needs a token, and there is none here. Put the head's token"),
        ("token", "another", "does not accept this token. Put the head's token"),
        ("disabled", HEAD, "needs a token, and RAY_AUTH_MODE is disabled. Run "),
    ],
)
def test_else_one_line_says_what_to_type(mode, token, said):
    with pytest.raises(ClusterError) as error:
        needs_token("h:1", mode, token, of(wants=True))
    assert str(error.value).startswith(f"The Ray at h:1 {said}")
    assert "~/.ray/auth_token" in str(error.value)

"""Which versions are served, and which one answers by default."""

from __future__ import annotations

import pytest

from raytf.errors import ConfigError
from raytf.inference.serving.served_versions import Policy, bounds


@pytest.mark.parametrize(
    ("text", "default", "there", "broken", "wanted", "answers"),
    [
        ("latest", None, [1, 2, 3], [], [3], 3),
        ("latest", None, [1, 2, 3], [3], [2], 2),
        ("latest", None, [], [], [], None),
        ("latest:2", None, [1, 2, 3], [], [3, 2], 3),
        ("latest", 1, [1, 2, 3], [], [3, 1], 1),
        ("latest", 1, [2, 3], [], [3], None),
        ("all", None, [1, 2, 3], [2], [3, 1], 3),
        ("1,3", None, [1, 2, 3, 4], [], [3, 1], 3),
        ("1,3", 1, [1, 2, 3, 4], [], [3, 1], 1),
        ("7", None, [1], [], [], None),
    ],
)
def test_which_versions_are_served(text, default, there, broken, wanted, answers):
    policy = Policy.of(text, default)
    assert policy.wanted(there, broken) == wanted
    assert policy.answering(wanted) == answers


@pytest.mark.parametrize(
    "text", ["", "newest", "latest:0", "latest:x", "all:2", "1,", "-1", "latest:", "²", "1,²", "latest:²", "9" * 5000]
)
def test_other_words_are_refused(text):
    with pytest.raises(ConfigError, match="--versions"):
        Policy.of(text)


def test_a_default_must_be_among_the_versions_that_are_named():
    with pytest.raises(ConfigError, match="--version 2 is not among --versions 1,3"):
        Policy.of("1,3", 2)


def test_versions_that_are_named_must_be_there():
    assert Policy.of("1,3", 3).required == {1, 3}
    assert Policy.of("latest", 9).required == {9}
    assert Policy.of("latest").required == set()


@pytest.mark.parametrize(("text", "expected"), [("1", (1, 1)), ("2", (2, 2)), ("1:4", (1, 4))])
def test_replicas(text, expected):
    assert bounds("--replicas", text) == expected


@pytest.mark.parametrize("text", ["0", "", "a", "2:1", "1:", "0:2", "1:x", "-1", "²", "1:²", "9" * 5000])
def test_replicas_that_cannot_be(text):
    with pytest.raises(ConfigError, match="--replicas"):
        bounds("--replicas", text)

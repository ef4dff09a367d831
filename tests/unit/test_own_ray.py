"""The token of a Ray of this machine's own is its user's only."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from raytf.own_ray import keep_token_private


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".ray" / "auth_token"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_is_made_for_one_user(token: Path):
    keep_token_private()
    assert (mode(token), len(token.read_text())) == (0o600, 64)
    text = token.read_text()
    keep_token_private()
    assert token.read_text() == text
    assert list(token.parent.iterdir()) == [token]


def test_one_that_ray_has_made_is_taken_back(token: Path):
    token.parent.mkdir()
    token.write_text("a" * 64)
    token.chmod(0o644)
    keep_token_private()
    assert (mode(token), token.read_text()) == (0o600, "a" * 64)


@pytest.mark.parametrize(("name", "value"), [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "b" * 64)])
def test_none_is_made_where_none_is_needed(token: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str):
    monkeypatch.setenv(name, value)
    keep_token_private()
    assert not token.exists()


def test_a_home_that_cannot_be_written_is_for_ray_to_complain_of(token: Path):
    token.parent.touch()
    keep_token_private()

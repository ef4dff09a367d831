"""A Ray of this machine's own: its token is its user's only, and who is told of its address finds it."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest
import ray
from ray._private import ray_constants

from raytf.cluster.local_ray import keep_token_private, reaching


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


@pytest.mark.parametrize(("host", "is_reachable"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_one_that_listens_on_the_loopback_only_is_found_there(host: str, is_reachable: bool):
    if ray.util.get_node_ip_address() == "127.0.0.1":
        pytest.skip("this machine has no address but the loopback's")
    with socket.create_server((host, 0)) as server, reaching(f"127.0.0.1:{server.getsockname()[1]}"):
        assert is_reachable == ray_constants.ENABLE_RAY_CLUSTER
        assert (ray.util.get_node_ip_address() == "127.0.0.1") != is_reachable
    assert ray_constants.ENABLE_RAY_CLUSTER


@pytest.mark.parametrize("address", ["auto", "", "10.0.0.1:6379", "127.0.0.1:1"])
def test_any_other_address_is_left_to_ray(address: str):
    with reaching(address):
        assert ray_constants.ENABLE_RAY_CLUSTER

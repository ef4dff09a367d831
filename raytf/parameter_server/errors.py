"""Errors that end a group with parameter servers."""

from __future__ import annotations

from raytf.errors import RaytfError


class ProcessDiedError(RaytfError):
    """A process has died without which its group cannot continue; the message says which one."""

    retryable = True

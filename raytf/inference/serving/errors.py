"""Requests that are refused."""

from __future__ import annotations

from http import HTTPStatus


class Refusal(Exception):
    """A request that gets an error for an answer.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, status: HTTPStatus, message: str):
        super().__init__(message)
        self.status = status


def bad(message: str) -> Refusal:
    """Return the refusal of a bad request."""
    return Refusal(HTTPStatus.BAD_REQUEST, message)

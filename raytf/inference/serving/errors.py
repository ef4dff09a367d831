"""Requests that are refused: the error, and what it quotes."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from raytf.errors import one_line


class Refusal(Exception):
    """A request that gets an error for an answer.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, status: HTTPStatus, message: str):
        super().__init__(message)
        self.status = status


def excerpt(value: Any, limit: int = 80) -> str:
    """A value as JSON, cut to what a message can hold."""
    try:
        text = one_line(json.dumps(value))
    except RecursionError:
        text = "lists that are nested too deeply"
    except TypeError:
        text = "lists of numbers"  # that are in arrays already
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def bad(message: str) -> Refusal:
    """A bad request."""
    return Refusal(HTTPStatus.BAD_REQUEST, message)

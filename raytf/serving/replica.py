"""One replica: HTTP requests in, batches through TensorFlow, answers out. Runs in a process of Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import numpy as np
from ray import serve
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from raytf import quiet
from raytf.errors import ModelError
from raytf.serving import api
from raytf.serving.api import Call
from raytf.serving.choice import Policy
from raytf.serving.refusals import Refusal
from raytf.signature import DEFAULT

_log = logging.getLogger("ray.serve")
#: What is read, for so long, of a body that is refused unread.
_DRAIN_BYTES, _DRAIN_SECONDS = 256 << 20, 5.0


@dataclass(frozen=True)
class Settings:
    """What every replica is told.

    Attributes:
        models: URI of the folder of versions.
        name: of the model.
        threads: of TensorFlow.
        poll_seconds: between two looks for new versions.
        batch_size: records that are given to the model at once.
        batch_wait_seconds: for which the first one of a batch waits for others.
        max_body_bytes: of a request.
        token_sha256: of the token that clients have to show, in hex; None lets everybody in.
    """

    models: str
    name: str
    policy: Policy = field(default_factory=Policy)
    threads: int = 1
    poll_seconds: float = 5.0
    batch_size: int = 64
    batch_wait_seconds: float = 0.002
    max_body_bytes: int = 32 << 20
    token_sha256: str | None = None


@dataclass(frozen=True)
class _Item:
    """A call on its way into a batch.

    Attributes:
        model: a loaded version; it stays in memory for this call, also when another one has taken over.
        most: records of a batch.
    """

    model: Any
    call: Call
    most: int

    @property
    def size(self) -> int:
        return min(self.most, self.call.records or 1)

    @property
    def together(self) -> tuple[Any, ...]:
        """Calls with equal ones may be given to the model as one."""
        call = self.call
        if not call.signature.is_batched or call.records is None:
            return (id(self),)
        shapes = tuple((name, array.shape[1:]) for name, array in sorted(call.inputs.items()))
        return (id(self.model), call.signature.name, shapes)


def _records(items: list[_Item]) -> int:
    return sum(item.size for item in items)


@serve.deployment
class Replica:
    """Answers requests with the versions that it has loaded; follows the folder of versions by itself."""

    def __init__(self, settings: Settings):
        quiet.load_tensorflow()
        from raytf.serving.shelf import Shelf, first_load  # TensorFlow is loaded by now, without its messages

        self._settings = settings
        self._run.set_max_batch_size(settings.batch_size)  # type: ignore[attr-defined]
        self._run.set_batch_wait_timeout_s(settings.batch_wait_seconds)  # type: ignore[attr-defined]
        self._shelf = Shelf(settings.models, settings.name, settings.policy, settings.threads, _log.info)
        first_load(self._shelf)
        self._stop = threading.Event()
        threading.Thread(
            target=self._shelf.follow, args=(settings.poll_seconds, self._stop), daemon=True, name="raytf-versions"
        ).start()

    def reconfigure(self, config: dict[str, Any]) -> None:
        """Ray Serve wants it where an application says who has deployed it; a replica does not care."""

    async def __call__(self, request: Request) -> Response:
        try:
            data = await self._answer(request)
            code = HTTPStatus.OK
        except Refusal as refusal:
            data, code = api.failure(str(refusal)), refusal.status
            await _drain(request)
        except ClientDisconnect:
            data, code = api.failure("The client has gone."), HTTPStatus.BAD_REQUEST
        except ModelError as error:
            data, code = api.failure(str(error)), HTTPStatus.BAD_REQUEST
        headers = {"WWW-Authenticate": "Bearer"} if code == HTTPStatus.UNAUTHORIZED else None
        return Response(data, code, headers, media_type="application/json")

    def example(self, url: str) -> str:
        """A command that asks for a prediction, for people to copy."""
        _, model = self._shelf.get(None)
        signature = model.signatures.get(DEFAULT) or next(iter(model.signatures.values()))
        header = "" if self._settings.token_sha256 is None else "Authorization: Bearer TOKEN"
        return api.example(signature, url, header)

    async def _answer(self, request: Request) -> bytes:
        settings = self._settings
        if request.url.path == api.HEALTH:
            version, _ = self._shelf.get(None)
            return api.healthy(settings.name, version)
        if not api.is_allowed(request.headers.get("authorization"), settings.token_sha256):
            raise Refusal(
                HTTPStatus.UNAUTHORIZED, "Expected the header Authorization: Bearer TOKEN, with the right token."
            )
        route = api.route(request.method, request.url.path)
        if route.model != settings.name:
            raise Refusal(
                HTTPStatus.NOT_FOUND, f"Servable not found for request: Latest({route.model}). Served: {settings.name}."
            )
        if route.verb == "status":
            return api.status(self._shelf.states(route.version))
        version, model = self._shelf.get(route.version)
        if route.verb == "metadata":
            return api.metadata(settings.name, version, model.definition)
        body = await self._body(request)
        if route.verb != "predict":
            raise api.refuse_examples(route.verb, body, model.signatures)
        call = api.parse(body, model.signatures)
        found = await self._run(_Item(model, call, settings.batch_size))
        if isinstance(found, Exception):
            raise found
        return api.respond(found, call)

    async def _body(self, request: Request) -> bytes:
        limit = self._settings.max_body_bytes
        length = request.headers.get("content-length", "")
        if length.isascii() and length.isdigit():
            api.check_size(int(length), limit)
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            api.check_size(size, limit)
            parts.append(part)
        return api.unpack(b"".join(parts), request.headers.get("content-encoding"), limit)

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.002, batch_size_fn=_records)
    async def _run(self, items: list[_Item]) -> list[Any]:
        return await asyncio.to_thread(run_batch, items)


async def _drain(request: Request) -> None:
    """Read what a refused client still sends, within limits: one that is cut off while it sends sees no answer."""
    read = 0
    with contextlib.suppress(ClientDisconnect, RuntimeError, TimeoutError):  # it has gone, all was read, it is slow
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for part in request.stream():
                read += len(part)
                if read > _DRAIN_BYTES:
                    break


def load_once(settings: Settings) -> None:
    """Try whether a replica could load what it is told to.

    Raises:
        ModelError: it could not; it says why.
    """
    quiet.load_tensorflow()
    from raytf.serving.shelf import Shelf, first_load

    first_load(Shelf(settings.models, settings.name, settings.policy, settings.threads, lambda text: None))


def run_batch(items: list[_Item]) -> list[Any]:
    """Outputs for each item, in order, or the error that is the answer to it."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, item in enumerate(items):
        groups.setdefault(item.together, []).append(i)
    results: list[Any] = [None] * len(items)
    for members in groups.values():
        try:
            answers = _run_together([items[i] for i in members])
        except ModelError as error:
            # One request's numbers may be what the model refuses: the others are tried alone.
            answers = [_run_alone(items[i]) for i in members] if len(members) > 1 else [error]
        for i, answer in zip(members, answers, strict=True):
            results[i] = answer
    return results


def _run_alone(item: _Item) -> Any:
    try:
        return item.model.run(item.call.signature.name, item.call.inputs)
    except ModelError as error:
        return error


def _run_together(items: list[_Item]) -> list[Any]:
    first = items[0]
    if len(items) == 1:
        return [first.model.run(first.call.signature.name, first.call.inputs)]
    inputs = {name: np.concatenate([item.call.inputs[name] for item in items]) for name in first.call.inputs}
    outputs = first.model.run(first.call.signature.name, inputs)
    counts = [item.call.records or 0 for item in items]
    if any(value.ndim == 0 or len(value) != sum(counts) for value in outputs.values()):
        return [_run_alone(item) for item in items]  # no row of output for each of input after all
    ends = np.cumsum(counts)[:-1]
    parts = {name: np.split(value, ends) for name, value in outputs.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(len(items))]

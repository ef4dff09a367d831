"""A replica, in a process of Ray Serve: batches HTTP requests and answers them with a model's outputs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

import numpy as np
from ray import serve
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from raytf import _process
from raytf.distributed.gpu import visibility
from raytf.errors import ModelError
from raytf.inference.serving import exchange, rest_api
from raytf.inference.serving.limits import DiskRoom, Refusal, RoomQueue, Spool, bad, return_freed_memory
from raytf.inference.serving.rest_api import PredictCall
from raytf.inference.serving.served_versions import LoadedVersions, Policy
from raytf.inference.signature import DEFAULT

_log = logging.getLogger("ray.serve")
#: The most bytes of tensors in one call of the model, or in one answer that is not sent in pieces.
_MOST_AT_ONCE = 256 << 10
#: An answer with fewer bytes of tensors is encoded without a thread.
_LITTLE = 16 << 10
#: The most bytes of an answer, which waits on disk.
_MOST_ANSWER = 2 << 30


@dataclass(frozen=True)
class ReplicaSettings:
    """Settings of every replica.

    Attributes:
        models: URI of the folder of versions.
        name: name of the model.
        threads: number of TensorFlow's threads.
        poll_seconds: seconds between two checks for new versions.
        batch_size: the most records in one call of the model.
        batch_wait_seconds: how long the first request of a batch waits for others.
        max_body_bytes: the most bytes of a request's body.
        token_sha256: SHA-256, in hex, of the token that clients must send; None if they need no token.
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
class _BatchItem:
    """A call that waits for a batch.

    Attributes:
        model: a loaded version, which stays in memory for this call even if a newer one replaces it.
        most: the most records of a batch.
    """

    model: Any
    call: PredictCall
    most: int

    @property
    def size(self) -> int:
        return min(self.most, self.call.records or 1)

    @property
    def together(self) -> tuple[Any, ...]:
        """A key: calls with equal keys can be batched into one model call."""
        call = self.call
        if not call.signature.is_batched or call.records is None:
            return (id(self),)
        shapes = tuple((name, array.shape[1:]) for name, array in sorted(call.inputs.items()))
        return (id(self.model), call.signature.name, shapes)


def _records(items: list[_BatchItem]) -> int:
    return sum(item.size for item in items)


@serve.deployment
class Replica:
    """Answers requests with the versions that it has loaded, and follows the folder of versions by itself."""

    def __init__(self, settings: ReplicaSettings):
        visibility.hide_unless_given()
        return_freed_memory()
        _process.load_tensorflow()
        self._settings = settings
        self._run.set_max_batch_size(settings.batch_size)  # type: ignore[attr-defined]
        self._run.set_batch_wait_timeout_s(settings.batch_wait_seconds)  # type: ignore[attr-defined]
        #: Room for large bodies; their tensors take a few times as much memory.
        self._room = RoomQueue(settings.max_body_bytes)
        self._shelf = LoadedVersions(settings.models, settings.name, settings.policy, settings.threads, _log.info)
        self._shelf.load_first()
        self._stop = threading.Event()
        threading.Thread(
            target=self._shelf.follow, args=(settings.poll_seconds, self._stop), daemon=True, name="raytf-versions"
        ).start()

    def reconfigure(self, config: dict[str, Any]) -> None:
        """Accept the settings of the command that deployed the application; a replica needs none of them."""

    async def __call__(self, request: Request) -> Response:
        if exchange.FRONT not in request.headers:
            # Without the middleware's limits, one client could block all others.
            text = (
                "raytf serve did not start Ray Serve on this cluster. Stop it with `serve shutdown`, then start again."
            )
            return Response(rest_api.failure(text), HTTPStatus.SERVICE_UNAVAILABLE, media_type="application/json")
        if request.url.path == exchange.SETTINGS:
            return Response(json.dumps(self._served()), media_type="application/json")
        if exchange.LARGE in request.headers:
            return StreamingResponse(self._in_pieces(request))
        try:
            data, code = await self._answer(request), HTTPStatus.OK
        except Refusal as refusal:
            data, code = rest_api.failure(str(refusal)), refusal.status
        except ClientDisconnect:
            data, code = rest_api.failure("The client disconnected."), HTTPStatus.BAD_REQUEST
        if data is None:
            return Response(headers={exchange.AGAIN: "1"})
        headers = {"WWW-Authenticate": "Bearer"} if code == HTTPStatus.UNAUTHORIZED else None
        return Response(data, code, headers, media_type="application/json")

    def example(self, url: str) -> str:
        """Return a command for users to copy, which requests a prediction."""
        _, model = self._shelf.get(None)
        signature = model.signatures.get(DEFAULT) or next(iter(model.signatures.values()))
        header = "" if self._settings.token_sha256 is None else "Authorization: Bearer TOKEN"
        return rest_api.example(signature, url, header)

    def _served(self) -> dict[str, Any]:
        settings = self._settings
        version, _ = self._shelf.get(None)
        return {
            "name": settings.name,
            "max_body_bytes": settings.max_body_bytes,
            "token_sha256": settings.token_sha256,
            "health": rest_api.healthy(settings.name, version),
        }

    async def _answer(self, request: Request) -> bytes | None:
        """Return the answer to a request, or None if it is too large to be sent at once."""
        settings = self._settings
        route = self._route(request)
        if route.verb == "status":
            return rest_api.status(self._shelf.states(route.version))
        version, model = self._shelf.get(route.version)
        if route.verb == "metadata":
            return rest_api.metadata(settings.name, version, model.definition)
        body = await request.body()
        call = self._call(route, body, model)
        outputs = await self._outputs(model, call)
        weight = _weight(outputs)
        if weight > _MOST_AT_ONCE:
            return None
        if weight < _LITTLE:
            return rest_api.respond(outputs, call)
        return await asyncio.to_thread(rest_api.respond, outputs, call)

    def _route(self, request: Request) -> rest_api.RestRoute:
        rest_api.check_token(request.headers.get("authorization"), self._settings.token_sha256)
        route = rest_api.route(request.method, request.url.path)
        rest_api.check_model(route.model, self._settings.name)
        return route

    def _call(self, route: rest_api.RestRoute, body: bytes | bytearray, model: Any) -> PredictCall:
        if route.verb != "predict":
            raise rest_api.refuse_examples(route.verb, body, model.signatures)
        return rest_api.parse(body, model.signatures)

    async def _in_pieces(self, request: Request) -> AsyncIterator[bytes]:
        """Yield the answer to a request that is large or has a large answer; see `exchange`."""
        size = int(request.headers[exchange.LARGE])
        stream = request.stream()
        with Spool(DiskRoom(_MOST_ANSWER)) as answer, contextlib.suppress(ClientDisconnect, StopAsyncIteration):
            async with self._room.hold(size):
                body = bytearray()
                async for message in exchange.take_body(stream, size, body):
                    yield message
                code = HTTPStatus.OK
                try:
                    await self._answer_large(request, body, answer)
                except Refusal as refusal:
                    code = refusal.status
                    answer.clear()
                    answer.write(rest_api.failure(str(refusal)))
            async for message in exchange.give_answer(stream, code, answer):
                yield message

    async def _answer_large(self, request: Request, body: bytearray, answer: Spool) -> None:
        route = self._route(request)
        _, model = self._shelf.get(route.version)
        # In a thread, piece by piece, so that other requests are answered in the meantime.
        call = await asyncio.to_thread(self._call, route, body, model)
        body.clear()
        outputs = await self._outputs(model, call)

        def write() -> None:
            for part in rest_api.answer(outputs, call):
                answer.write(part)

        await asyncio.to_thread(write)

    async def _outputs(self, model: Any, call: PredictCall) -> dict[str, np.ndarray]:
        """Return the outputs of the model; a large call runs in parts, so that other calls run in between."""
        whole: dict[str, np.ndarray] = {}
        records = call.records or 0
        for begin, end in parts(call, self._settings.batch_size):
            inputs = {name: array[begin:end] for name, array in call.inputs.items()}
            outputs = await self._run_one(model, replace(call, inputs=inputs))
            if any(value.ndim == 0 or len(value) != end - begin for value in outputs.values()):
                break  # the outputs do not have one row for each input after all
            for name, value in outputs.items():
                if name not in whole:
                    whole[name] = np.empty((records, *value.shape[1:]), value.dtype)
                elif value.shape[1:] != whole[name].shape[1:]:
                    raise bad(f"Tensor name: {name} has rows of different shapes. Send fewer instances at a time.")
                whole[name][begin:end] = value
        else:
            if whole:
                return whole
        return await self._run_one(model, call)

    async def _run_one(self, model: Any, call: PredictCall) -> dict[str, np.ndarray]:
        outputs = await self._run(_BatchItem(model, call, self._settings.batch_size))
        if isinstance(outputs, ModelError):
            raise bad(str(outputs))
        return outputs

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.002, batch_size_fn=_records)
    async def _run(self, items: list[_BatchItem]) -> list[Any]:
        return await asyncio.to_thread(run_batch, items)


def parts(call: PredictCall, batch_size: int) -> list[tuple[int, int]]:
    """Return the parts (first record, end) of a large call, or an empty list for a call that runs as one."""
    records, size = call.records, sum(array.nbytes for array in call.inputs.values())
    if not records or not call.signature.is_batched or size <= _MOST_AT_ONCE:
        return []
    step = max(1, batch_size, records * _MOST_AT_ONCE // size)
    return [(at, min(at + step, records)) for at in range(0, records, step)] if step < records else []


def _weight(outputs: dict[str, np.ndarray]) -> int:
    """Return about how many bytes of memory the outputs take while an answer is encoded."""
    numbers = sum(value.nbytes for value in outputs.values() if value.dtype.kind != "O")
    return numbers + sum(
        len(text) for value in outputs.values() if value.dtype.kind == "O" for text in value.ravel().tolist()
    )


def load_once(settings: ReplicaSettings) -> None:
    """Check that a replica with these settings can load its model.

    Raises:
        ModelError: it cannot; the message says why.
    """
    with visibility.unseen():  # this task's process may get a GPU later
        _process.load_tensorflow()
    LoadedVersions(settings.models, settings.name, settings.policy, settings.threads, lambda text: None).load_first()


def run_batch(items: list[_BatchItem]) -> list[Any]:
    """Return, for each item in order, the outputs, or the error with which to answer it."""
    groups: dict[tuple[Any, ...], list[_BatchItem]] = {}
    for item in items:
        groups.setdefault(item.together, []).append(item)
    results: dict[int, Any] = {}
    for members in groups.values():
        outputs = _run_together(members) if len(members) > 1 else None
        # The model may reject the values of one request, so each request of the batch then runs alone.
        results |= zip(map(id, members), outputs or [_run_alone(item) for item in members], strict=True)
    return [results[id(item)] for item in items]


def _run_alone(item: _BatchItem) -> Any:
    try:
        return item.model.run(item.call.signature.name, item.call.inputs)
    except ModelError as error:
        return error


def _run_together(items: list[_BatchItem]) -> list[dict[str, np.ndarray]] | None:
    """Return the outputs for each item from one call of the model, or None if each item must run alone."""
    first = items[0]
    inputs = {name: np.concatenate([item.call.inputs[name] for item in items]) for name in first.call.inputs}
    try:
        outputs = first.model.run(first.call.signature.name, inputs)
    except ModelError:
        return None
    counts = [item.call.records or 0 for item in items]
    if any(value.ndim == 0 or len(value) != sum(counts) for value in outputs.values()):
        return None  # the outputs do not have one row for each input after all
    ends = np.cumsum(counts)[:-1]
    parts = {name: np.split(value, ends) for name, value in outputs.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(len(items))]

"""The application: OpenAI's completions and chat API over an engine's thread."""

import asyncio
import contextlib
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lowrank_kv_jax.serving.http.asked import Asked, read_asked
from lowrank_kv_jax.serving.http.body import read_body
from lowrank_kv_jax.serving.http.encoding import encode
from lowrank_kv_jax.serving.http.engine_thread import Closed, EngineThread, Heard, QueueFull, Ticket
from lowrank_kv_jax.serving.http.refusal import Refusal, as_json
from lowrank_kv_jax.serving.http.replies import Reply, failed
from lowrank_kv_jax.serving.http.words import Words
from lowrank_kv_jax.serving.requests import MOST_SEED
from lowrank_kv_jax.serving.requests import Request as Wanted

ENDED = ("stop", "length")
"""Answers that ended well."""


class Api:
    """Endpoints of one engine.

    Args:
        model: a `LoadedModel` with a tokenizer.
        thread: with the engine of this model.
        name: of the model, for clients.
        method: how caches are compressed, for those who look.
        room: tokens of an answer whose request does not limit it.
        most_body: bytes of a request.
    """

    def __init__(self, model: Any, thread: EngineThread, name: str, method: str, room: int, most_body: int):
        self._model, self._thread, self._name, self._method = model, thread, name, method
        self._room, self._most_body = room, most_body
        self._bytes = thread.engine.bytes  # of all rows; a prompt that is read in chunks takes more meanwhile
        # a text of the largest body takes a second: one after the other, and beside the event loop
        self._encoding = ThreadPoolExecutor(1, "encoding")

    def app(self) -> Starlette:
        """As an ASGI application."""
        routes = [
            Route("/v1/completions", self._guarded(self.complete), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self.chat), methods=["POST"]),
            Route("/v1/models", self._guarded(self.models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guarded(self.models), methods=["GET"]),
            Route("/health", self._guarded(self.health), methods=["GET"]),
        ]
        paths = ", ".join(f"{min(route.methods or ())} {route.path}" for route in routes).replace(":path", "")

        async def unknown(request: Request, error: Exception) -> Response:
            status = error.status_code if isinstance(error, HTTPException) else 500
            line = f"{request.method} {request.url.path[:200]}: there is no such endpoint, only {paths}"
            return _refused(Refusal(status, line, code="unknown_url"))

        return Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown})

    def _guarded(self, endpoint: Callable) -> Callable:
        """What an endpoint refuses, and what it fails with, as OpenAI's JSON."""

        async def guarded(request: Request) -> Response:
            try:
                return await endpoint(request)
            except Refusal as refusal:
                return _refused(refusal)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            except Exception as error:
                line = f"{type(error).__name__}: {' '.join(str(error).split())}"
                print(f"lowrank-kv: error: {request.url.path}: {line}", file=sys.stderr, flush=True)
                return _refused(Refusal(500, line, code="internal_error"))

        return guarded

    # ---- endpoints ----------------------------------------------------------------------------------------------

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, chat=False)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, chat=True)

    async def models(self, request: Request) -> Response:
        """GET /v1/models and /v1/models/NAME."""
        asked = request.path_params.get("name")
        one = {"id": self._name, "object": "model", "created": 0, "owned_by": "lowrank-kv-jax"}
        if asked is None:
            return _json({"object": "list", "data": [one]})
        if asked != self._name:
            raise Refusal(404, f"model={asked[:200]!r}: is not served here, only {self._name!r}", param="model",
                          code="model_not_found")
        return _json(one)

    async def health(self, request: Request) -> Response:
        """GET /health."""
        engine = self._thread.engine
        if self._thread.closed:
            raise _closed()
        return _json({
            "status": "ok", "model": self._name, "method": self._method, "rows": list(engine.slots),
            "in_flight": engine.in_flight, "waiting": engine.waiting, "cache_bytes": self._bytes,
        })

    # ---- answers ------------------------------------------------------------------------------------------------

    async def _answer(self, request: Request, chat: bool) -> Response:
        asked = read_asked(await read_body(request, self._most_body), self._name, chat)
        loop, tokenizer = asyncio.get_running_loop(), self._model.tokenizer
        longest = self._thread.engine.layouts[-1].prompt
        prefix, prompt = await loop.run_in_executor(self._encoding, encode, tokenizer, asked, longest)
        told: asyncio.Queue[Heard] = asyncio.Queue()
        ticket = self._submit(asked, prefix, prompt, lambda heard: _put(loop, told, heard))
        reply = Reply(asked, self._name, chat, len(prompt) + len(prefix or ()), Words(tokenizer, asked.stop))
        try:
            heard = await _unless_gone(request, told, until_end=not asked.stream)
            _check(heard, asked)
        except BaseException:
            self._thread.cancel(ticket)
            raise
        if not asked.stream:
            return _json(reply.whole(heard))
        return _Stream(self._events(reply, heard, told, asked), lambda: self._thread.cancel(ticket))

    def _submit(self, asked: Asked, prefix, prompt, tell: Callable[[Heard], None]) -> Ticket:
        """Queue it.

        Raises:
            Refusal: 400, a number that is out of range; 429, the queue is full; 503, the server ends.
        """
        drawing = {**asked.drawing}
        if drawing["seed"] is None:
            drawing["seed"] = secrets.randbelow(MOST_SEED + 1)
        tokens = asked.tokens or min(asked.tokens_by_default or self._room, self._room)
        try:
            wanted = Wanted(prompt, prefix, max_new_tokens=tokens, stop=asked.stop, **drawing)
            return self._thread.submit(wanted, tell)
        except ValueError as error:
            raise _named(str(error), asked) from error
        except QueueFull as error:
            most = self._thread.most
            raise Refusal(429, f"requests={most}: as many are answered or wait already; must be fewer than {most} "
                               "(--slots, --queue)", code="queue_full", retry=True) from error
        except Closed as error:
            raise _closed() from error

    async def _events(self, reply: Reply, heard: Heard, told: asyncio.Queue, asked: Asked) -> AsyncIterator[str]:
        for event in reply.begin():
            yield event
        while True:
            for event in reply.piece(heard):
                yield event
            if heard.finish is not None:
                return
            heard = await told.get()
            try:
                _check(heard, asked)
            except Refusal as refusal:
                yield failed(refusal)
                return


class _Stream(StreamingResponse):
    """Events, and what is to be done when they end, in whatever way: also if they never began."""

    def __init__(self, events: AsyncIterator[str], over: Callable[[], None]):
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._over()


async def _unless_gone(request: Request, told: asyncio.Queue, until_end: bool) -> Heard:
    """The first that is heard, or the end.

    Raises:
        ClientDisconnect: nobody waits for it any more.
    """
    gone, hear = asyncio.ensure_future(_gone(request)), None
    try:
        while True:
            hear = asyncio.ensure_future(told.get())
            await asyncio.wait((hear, gone), return_when=asyncio.FIRST_COMPLETED)
            if not hear.done():
                raise ClientDisconnect
            heard = hear.result()
            if heard.finish is not None or not until_end:
                return heard
    finally:
        for task in filter(None, (gone, hear)):
            task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _put(loop: asyncio.AbstractEventLoop, told: asyncio.Queue, heard: Heard) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody hears
        loop.call_soon_threadsafe(told.put_nowait, heard)


def _check(heard: Heard, asked: Asked) -> None:
    """Raise Refusal for an end that is no answer."""
    if heard.finish is None or heard.finish in ENDED:
        return
    if heard.finish == "refused":
        raise _named(heard.error or "", asked)
    if heard.finish == "closed":
        raise _closed()
    raise Refusal(500, heard.error or heard.finish, code="fault")


def _named(line: str, asked: Asked) -> Refusal:
    """What the engine says of its own fields, in those of the API and the options of the command."""
    names = {"max_new_tokens": asked.tokens_field}
    names |= {"(room=)": "(--room)", "(prompt=)": "(--prompt)"}
    for own, shown in names.items():
        line = line.replace(own, shown)
    field = line.split("=")[0].split(" ")[0]
    line += " (by default)" if asked.tokens is None and field == asked.tokens_field else ""
    long = field == asked.tokens_field or "tokens: this engine takes" in line
    return Refusal(400, line, param=field, code="context_length_exceeded" if long else "invalid_value")


def _closed() -> Refusal:
    return Refusal(503, "the server is ending, or its engine has stopped", code="closed")


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(as_json(value), status, headers, "application/json")


def _refused(refusal: Refusal) -> Response:
    return _json(refusal.body, refusal.status, refusal.headers)

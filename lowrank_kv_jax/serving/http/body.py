"""The body of a request: of bounded size, in bounded time, JSON."""

import asyncio
from typing import Any

from starlette.requests import Request

from lowrank_kv_jax.checks.json_objects import parse_json
from lowrank_kv_jax.checks.shown import short
from lowrank_kv_jax.serving.http.refusal import Refusal

DRAINED = 8
"""Of a body that is too large, so many times what is allowed are read and dropped: a client that is still writing would
not read why it is refused."""

SECONDS = 30.0
"""In which a body has to be there."""


async def read_body(request: Request, most: int) -> Any:
    """What it holds.

    Args:
        most: bytes.

    Raises:
        Refusal: 413, 408, 415 or 400.
        ClientDisconnect: the client is gone.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, f"content-type={short(kind)}: must be application/json", code="unsupported_media_type")
    text = await _read(request, most)
    try:
        return parse_json(text, parse_constant=_no_number)
    except ValueError as error:
        raise Refusal(400, f"the body is no JSON: {error}", code="invalid_json") from error


async def _read(request: Request, most: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    size = int(declared) if declared.isdecimal() else 0
    read, pieces = 0, []
    if size <= DRAINED * most:
        try:
            async with asyncio.timeout(SECONDS):
                async for piece in request.stream():
                    read += len(piece)
                    if read > DRAINED * most:
                        break
                    if read <= most:
                        pieces.append(piece)
        except TimeoutError as error:
            line = f"the body was not there after {SECONDS:g} s, {read} bytes were"
            raise Refusal(408, line, code="timeout") from error
    if max(size, read) > most:
        raise Refusal(413, f"the body has {max(size, read)} bytes or more: must be at most {most} (--max-body)",
                      code="request_too_large")
    return b"".join(pieces)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")

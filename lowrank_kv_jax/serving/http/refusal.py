"""Errors in the form that OpenAI's clients read."""

import json
from typing import Any


class Refusal(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP.
        message: one line that names the field, its value and what is allowed.
        param: the field, where one is to blame.
        code: a word for programs.
        retry: whether the same request may be answered a little later.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: bool = False
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry = status, message, param, code, retry

    @property
    def body(self) -> dict[str, Any]:
        """The object `error` of OpenAI's API."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {"retry-after": "1"} if self.retry else {}


def as_json(value: Any) -> str:
    """In ASCII: what a model writes, or a client asks for, may be no text in UTF-8."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))

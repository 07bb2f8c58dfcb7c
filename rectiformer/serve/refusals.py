"""Why a request is not answered: a status, a code for programs, a line for people."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi.responses import JSONResponse

LONGEST_MESSAGE = 300


@dataclass(frozen=True)
class Kind:
    """A way to be refused."""

    status: int
    code: str
    closes: bool = False
    """Whether the connection ends with it, because a request was not read to its end."""
    retry_after: int | None = None
    """Seconds after which it may be worth trying again."""


NOT_HTTP = Kind(400, "not_http", closes=True)
NOT_JSON = Kind(400, "not_json")
UNAUTHORIZED = Kind(401, "unauthorized")
FORBIDDEN = Kind(403, "forbidden")
NOT_FOUND = Kind(404, "not_found")
NO_METHOD = Kind(405, "method_not_allowed")
SLOW_HEADERS = Kind(408, "slow_headers", closes=True)
SLOW_BODY = Kind(408, "slow_body", closes=True)
TOO_LARGE = Kind(413, "too_large", closes=True)
NOT_JSON_TYPE = Kind(415, "unsupported_type", closes=True)
INVALID = Kind(422, "invalid")
OVER_LIMIT = Kind(422, "over_limit")
LARGE_HEADERS = Kind(431, "large_headers", closes=True)
BUSY = Kind(429, "busy", retry_after=1)
FAILED = Kind(500, "failed")
UNAVAILABLE = Kind(503, "unavailable", retry_after=1)
LATE = Kind(504, "deadline")


class RefusalError(Exception):
    """A request that is not answered, and why."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    def response(self) -> JSONResponse:
        """What the client is told; one line, of bounded length, whatever the request had in it."""
        kind, line = self.kind, " ".join(str(self).split())
        message = line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]}..."
        headers = {"Connection": "close"} if kind.closes else {}
        if kind.retry_after is not None:
            headers["Retry-After"] = str(kind.retry_after)
        if kind is UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse({"error": {"code": kind.code, "message": message}}, kind.status, headers)

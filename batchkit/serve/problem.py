"""Error responses in OpenAI's format."""

from __future__ import annotations

from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class ApiProblem(Exception):
    """An error that ends a request with the HTTP ``status``. ``param``: name of the wrong parameter; ``code``: kind of
    problem."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def to_json(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }


def missing(kind: str, name: str) -> ApiProblem:
    """Return a 404 error for an object that does not exist.

    Objects of other API keys get the same error, so that a user can't find out whether they exist.
    """
    return ApiProblem(404, f"No such {kind} object: {name}", param="id", code="not_found")

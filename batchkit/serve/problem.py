"""Error responses in OpenAI's shape."""

from __future__ import annotations

from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class ApiProblem(Exception):
    """An exception that ends a request with ``status``. ``param`` names the wrong parameter, ``code`` the kind of
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
    """Return a 404. Objects of other keys give the same answer, so a key can't probe for them."""
    return ApiProblem(404, f"No such {kind} object: {name}", param="id", code="not_found")

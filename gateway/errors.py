"""Every error a client can see, as one tree. ``middleware.py`` is the only place that turns them into responses.

A body is always ``{"error": {"message", "type", "param", "code"}}``, all four fields present, as OpenAI's
clients expect. Messages are written for the caller: they never carry a path, a process id, a class name or
a traceback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stencilpress.engine.messages import Finished
from stencilpress.gateway.intake_records import Rejected

RETRY_AFTER_S = 1
"""Suggested wait after a 503: an engine restarts in seconds, and a queue drains in less."""


class ApiError(Exception):
    """Base of the tree. Subclasses fix the status; an instance carries the text."""

    status = 500
    type = "server_error"
    code: str | None = "internal_error"
    headers: Mapping[str, str] = {}

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def fields(self) -> dict[str, Any]:
        """The four fields of OpenAI's error object."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def body(self) -> bytes:
        """The JSON body of a response, and the data of an event once headers have been sent."""
        return msgspec.json.encode({"error": self.fields()})


class InternalError(ApiError):
    """A fault of ours. The text says nothing about it; the log does, with ``cause`` where the engine gave one."""

    def __init__(self, cause: str = "") -> None:
        super().__init__("The server had an error while processing your request.")
        self.cause = cause


class InvalidRequestError(ApiError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class PastExpiryError(InvalidRequestError):
    """What is to expire would have done so already. Asked earlier it would have been right, so it is no 400."""

    status = 422
    code = "in_the_past"


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"


class AuthenticationError(ApiError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"
    headers: Mapping[str, str] = {"WWW-Authenticate": "Bearer"}


class PermissionDeniedError(ApiError):
    status = 403
    type = "permission_error"
    code = "permission_denied"


class NotFoundError(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFoundError(NotFoundError):
    """Unknown and foreign models look the same."""

    code = "model_not_found"

    def __init__(self, model: str) -> None:
        shown = model if len(model) <= 128 else model[:128] + "…"
        super().__init__(f"The model '{shown}' does not exist or you do not have access to it.", param="model")


class MethodNotAllowedError(ApiError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class ConflictError(ApiError):
    """Only for the catalog's calls; inference never answers 409, which clients retry."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class AliasMovedError(ConflictError):
    """A compare-and-set that came too late: somebody else moved the alias."""

    code = "alias_moved"


class SmokeRequiredError(ConflictError):
    """``prod`` would get a version whose smoke prompts have not passed."""

    code = "smoke_required"

    def __init__(self, version: int) -> None:
        super().__init__(f"version: {version} must pass the adapter's smoke prompts first", param="version")
        self.version = version


class SmokeFailedError(ApiError):
    """A version did not pass the adapter's smoke prompts, so the alias stays where it is. ``results`` says why."""

    status = 422
    type = "invalid_request_error"
    code = "smoke_failed"

    def __init__(self, version: int, results: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(f"version: {version} did not pass the adapter's smoke prompts", param="version")
        self.results = results

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "results": list(self.results)}


class RequestTooLargeError(ApiError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedMediaTypeError(ApiError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class InvalidAdapterError(ApiError):
    """An upload that intake refused: every fault found, and what of it fits the base all the same."""

    status = 422
    type = "invalid_request_error"
    code = "invalid_adapter"

    def __init__(self, message: str, *, rejected: Rejected) -> None:
        super().__init__(message)
        self.rejected = rejected

    @property
    def findings(self) -> tuple[str, ...]:
        """The faults as lines for people."""
        return tuple(f"{finding.field}: {finding.message}" for finding in self.rejected.findings)

    def fields(self) -> dict[str, Any]:
        found = msgspec.to_builtins(self.rejected)
        del found["type"]  # the struct's tag
        return {**super().fields(), **found}


class TooManyUploadsError(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "too_many_uploads"
    headers: Mapping[str, str] = {"Retry-After": "5"}


class InsufficientStorageError(ApiError):
    """The disk is full. Nothing of the upload stays."""

    status = 507
    code = "insufficient_storage"
    headers: Mapping[str, str] = {"x-should-retry": "false"}


class RateLimitError(ApiError):
    """A limit of the tenant's plan. ``dimension`` names it; ``retry_ms`` is when there may be room, None for never."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(
        self, message: str, *, dimension: str, retry_ms: int | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.dimension = dimension
        self.retry_ms = retry_ms
        if retry_ms is None:
            waits = {"x-should-retry": "false"}
        else:
            waits = {"Retry-After": str(-(-retry_ms // 1000)), "retry-after-ms": str(retry_ms)}
        self.headers = {**(headers or {}), **waits}

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "dimension": self.dimension, "retry_after_ms": self.retry_ms}


class InsufficientQuotaError(RateLimitError):
    """The budget of a day or month is spent: trying again does not help before the next one."""

    type = "insufficient_quota"
    code = "insufficient_quota"


class UnavailableError(ApiError):
    """The server cannot answer now; the same request may succeed soon."""

    status = 503
    code = "service_unavailable"
    headers: Mapping[str, str] = {"Retry-After": str(RETRY_AFTER_S)}


class OverloadedError(UnavailableError):
    code = "server_is_overloaded"


class EngineLostError(UnavailableError):
    code = "engine_lost"


class DeadlineExceededError(ApiError):
    """The time that the caller or the operator lets a request wait is over. A client that tried again by itself would
    wait as long once more."""

    status = 503
    code = "deadline_exceeded"
    headers: Mapping[str, str] = {"Retry-After": str(RETRY_AFTER_S), "x-should-retry": "false"}


class RequestTimeoutError(ApiError):
    """The answer took too long. The same request would take as long again."""

    status = 504
    code = "request_timeout"
    headers: Mapping[str, str] = {"x-should-retry": "false"}


class AdapterUnavailableError(ApiError):
    """The adapter's weights cannot be loaded. Trying again at once would not help, so clients are told not to."""

    status = 503
    code = "adapter_unavailable"
    headers: Mapping[str, str] = {"Retry-After": "60", "x-should-retry": "false"}


def from_finished(finished: Finished) -> ApiError:
    """The error of a request that the engine ended with ``reason="error"``.

    The engine's own text is for the log; a client gets ours.
    """
    match finished.code:
        case "adapter_unavailable":
            return AdapterUnavailableError("The adapter of this model cannot be loaded.")
        case "context_exceeded":
            return ContextLengthError("The prompt and the answer do not fit the model's context.")
        case "capacity":
            return InvalidRequestError(
                "The prompt and the answer together need more memory than this server has; "
                "shorten the prompt or lower max_tokens.",
                code="capacity_exceeded",
            )
        case "overloaded":
            return OverloadedError("The server is overloaded; try again shortly.")
        case "deadline":
            return DeadlineExceededError("The request waited too long for its turn.")
        case "engine_lost":
            return EngineLostError("The engine stopped while it was working on your request; try again.")
    return InternalError(finished.message)

"""Every failure of an app as one shape: ``{"error": {"message", "type", "param", "code"}}``.

``install_error_handlers`` is called once per app. Errors of our own tree carry their status and text; third parties'
(an unknown route, a validation error of the framework) are translated here; anything else is a 500 that tells the
caller nothing but the request id, and is logged with its traceback.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from common.errors import (
    AuthenticationError,
    BodyEncodingError,
    ContextLengthError,
    DrainingError,
    InvalidRequestError,
    ModelNotFoundError,
    PermissionDeniedError,
    PrefillLegRejectedError,
    QueueFullError,
    RequestAbortedError,
    TandemError,
)
from common.wire.headers import DROPPED_HEADER, LEG_FAILED, LEG_HEADER, REQUEST_ID_HEADER

logger = logging.getLogger(__name__)

INTERNAL_MESSAGE = "internal error"

# Status -> (type, code) of errors that frameworks raise.
_HTTP_KINDS: Mapping[int, tuple[str, str]] = {
    400: ("invalid_request_error", "bad_request"),
    404: ("not_found_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
}

# Type -> status of errors that come without one.
_STATUSES: Mapping[str, int] = {
    kind.type: kind.status
    for kind in (InvalidRequestError, AuthenticationError, PermissionDeniedError, ModelNotFoundError, QueueFullError)
}

_TYPES: Mapping[int, str] = {status: kind for kind, status in _STATUSES.items()}

# Where servers of other makes have an error's text, if it stands alone.
_MESSAGE_NAMES = ("error", "detail", "message")
MAX_FOREIGN_CHARS = 2000
"""Of such a text that are told."""


def error_body(error: Exception) -> dict[str, Any]:
    """The JSON body of ``error``; one that is not ours says nothing about itself."""
    if isinstance(error, TandemError):
        return _body(error.message, error.type, error.param, error.code)
    return _body(INTERNAL_MESSAGE, TandemError.type, None, TandemError.code)


def read_error(body: object, status: int | None = None) -> TandemError:
    """The error that ``error_body`` made ``body`` of, or another server one of the same shape. ``status``: its
    answer's; None: it came as an event, which has none.

    Raises:
        ValueError: ``body`` is of another shape.
    """
    value = body.get("error") if isinstance(body, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(value.get("message"), str):
        raise ValueError("not an error with a message")
    error = TandemError(value["message"])
    for name in ("type", "code", "param"):
        if isinstance(value.get(name), str):
            setattr(error, name, value[name])
    if error.code == ContextLengthError.code:
        error.overflow = ContextLengthError.read(error.message)
    error.status = _STATUSES.get(error.type, TandemError.status) if status is None else status
    return error


def read_any_error(body: object, status: int) -> TandemError:
    """As ``read_error``, of what a server of another make, or a gateway before it, answers with ``status``: a text
    alone is the message, and where there is none the status has to do."""
    try:
        return read_error(body, status)
    except ValueError:
        fields = body if isinstance(body, Mapping) else {}
    texts = [fields.get(name) for name in _MESSAGE_NAMES]
    message = next((text for text in texts if isinstance(text, str) and text), f"the node answers {status}")
    error = TandemError(message[:MAX_FOREIGN_CHARS], code="http_error")
    error.status = status
    error.type = _TYPES.get(status, InvalidRequestError.type if status < 500 else TandemError.type)
    return error


def error_response(error: Exception) -> Response:
    """``error`` as a response: status, body and headers."""
    if isinstance(error, RequestAbortedError):
        return Response(status_code=error.status)
    headers: dict[str, str] = {}
    if isinstance(error, DrainingError) or (
        isinstance(error, QueueFullError | PrefillLegRejectedError) and error.status == QueueFullError.status
    ):
        headers["Retry-After"] = str(max(1, error.retry_after_s))
    if isinstance(error, BodyEncodingError):
        headers["Accept-Encoding"] = "identity"
    if isinstance(error, PrefillLegRejectedError):
        headers[LEG_HEADER] = LEG_FAILED
    if isinstance(error, TandemError) and error.dropped is not None:
        headers[DROPPED_HEADER] = error.dropped
    status = error.status if isinstance(error, TandemError) else TandemError.status
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_code=status, headers=headers)


def translate_validation(errors: Sequence[Any]) -> InvalidRequestError:
    """The first of a framework's validation errors, naming field and value."""
    if not errors:
        return InvalidRequestError("the request is invalid")
    first = errors[0]
    # The first element says where the value came from (body, query ...), the others are its path.
    name = ".".join(str(part) for part in first.get("loc", ())[1:])
    message = str(first.get("msg", "is invalid"))
    return InvalidRequestError(f"{name or 'body'}: {message}", param=name or None)


def install_error_handlers(app: Starlette) -> None:
    """Give ``app`` (FastAPI or Starlette) the handlers of this module."""
    app.add_exception_handler(TandemError, _on_tandem_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_client_disconnect)
    app.add_exception_handler(Exception, _on_unexpected)


def answer_error(error: Exception, *, request_id: str, path: str) -> Response:
    """Log ``error`` as its kind deserves, and its response."""
    if isinstance(error, RequestAbortedError):
        logger.info("request aborted by client request_id=%s path=%s", request_id, path)
    elif not isinstance(error, TandemError):
        logger.error("unexpected error request_id=%s path=%s", request_id, path, exc_info=error)
    elif error.status >= 500:
        logger.warning(
            "request failed request_id=%s path=%s status=%d code=%s message=%s",
            request_id,
            path,
            error.status,
            error.code,
            error.message,
        )
    return error_response(error)


def _body(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _request_id(request: Request) -> str:
    return str(getattr(request.state, "request_id", "-"))


async def _on_tandem_error(request: Request, error: Exception) -> Response:
    return answer_error(error, request_id=_request_id(request), path=request.url.path)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(translate_validation(error.errors()))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind, code = _HTTP_KINDS.get(error.status_code, ("server_error", "http_error"))
    message = str(error.detail)
    if error.status_code == 404:
        message = f"no route for {request.method} {request.url.path}"
    elif error.status_code == 405:
        message = f"method {request.method} is not allowed for {request.url.path}"
    return JSONResponse(_body(message, kind, None, code), status_code=error.status_code, headers=error.headers)


async def _on_client_disconnect(request: Request, error: Exception) -> Response:
    return await _on_tandem_error(request, RequestAbortedError("the client closed the connection"))


async def _on_unexpected(request: Request, error: Exception) -> Response:
    response = await _on_tandem_error(request, error)
    # This handler runs outside the middleware that adds the header.
    response.headers[REQUEST_ID_HEADER] = _request_id(request)
    return response

"""RFC 9457 problems: how errors become answers that name the field and the way out, and echo no input."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.status import HTTP_422_UNPROCESSABLE_CONTENT

from schemas.api.jobs import Invalid, Problem
from shared.errors import Conflict, LeaseLost, Rejected, Unavailable
from shared.telemetry.logs import get_logger

PROBLEM_TYPE: Final = "application/problem+json"
_TITLES: Final = {
    400: "Bad request",
    401: "Not authenticated",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    410: "Gone",
    411: "Length required",
    413: "Body too large",
    415: "Unsupported media type",
    422: "Invalid request",
    429: "Too many requests",
    500: "Internal error",
    503: "Unavailable",
}
_CODES: Final = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
    422: "invalid_request",
    500: "internal_error",
    503: "unavailable",
}
M = TypeVar("M", bound=BaseModel)
_log = get_logger()


class Unprocessable(Exception):
    """A request with one or more invalid fields: answered with 422 and all of them."""

    def __init__(self, errors: Sequence[Invalid]) -> None:
        super().__init__("; ".join(f"{error.field}: {error.detail}" for error in errors))
        self.errors = tuple(errors)


def parse_body(model: type[M], body: bytes) -> M:
    """Validate a JSON body. Raises Rejected (400) if it is no JSON, Unprocessable if fields are wrong."""
    try:
        return model.model_validate_json(body)
    except ValidationError as exc:
        raise to_unprocessable(exc, model) from exc


def to_unprocessable(exc: ValidationError, model: type[BaseModel] | None = None) -> Unprocessable | Rejected:
    """What to raise for a failed validation; ``model`` lets the answer name the fields that exist."""
    errors = exc.errors(include_url=False, include_input=False)
    if errors and errors[0]["type"] == "json_invalid":
        detail = str(errors[0].get("ctx", {}).get("error", "not JSON"))
        return Rejected(
            400, "malformed_json", f"the body is not valid JSON: {detail}", way_out="send one JSON object"
        )
    return Unprocessable([to_invalid(error, model) for error in errors])


def to_invalid(error: Mapping[str, Any], model: type[BaseModel] | None = None) -> Invalid:
    """One pydantic error as a JSON pointer, what is wrong, and what is allowed. The value is not repeated."""
    location = tuple(error.get("loc", ()))
    context = error.get("ctx") or {}
    detail = str(error.get("msg", "invalid")).removeprefix("Value error, ")
    return Invalid(
        field=to_pointer(location), detail=detail, way_out=_way_out(str(error.get("type")), context, location, model)
    )


def to_pointer(location: Iterable[int | str]) -> str:
    """RFC 6901; "" is the whole body."""
    return "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in location)


def to_problem(refused: Unprocessable | Rejected, *, place: str = "") -> Problem:
    """The problem alone, of a part of a request; its fields are named from ``place`` on."""
    if isinstance(refused, Unprocessable):
        errors, status, code, detail = list(refused.errors), 422, "invalid_request", _first_of(refused.errors)
    else:
        has_field = bool(refused.field or refused.way_out)
        errors = [Invalid(field=refused.field, detail=refused.detail, way_out=refused.way_out)] if has_field else []
        status, code, detail = refused.status, refused.code, str(refused)
    return Problem(
        type=f"urn:tidewright:problem:{code}",
        title=_TITLES.get(status, "Error"),
        status=status,
        detail=detail,
        errors=[each.model_copy(update={"field": f"{place}{each.field}"}) for each in errors],
    )


def problem(
    status: int,
    code: str,
    detail: str,
    *,
    instance: str | None = None,
    errors: Sequence[Invalid] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    body = Problem(
        type=f"urn:tidewright:problem:{code}",
        title=_TITLES.get(status, "Error"),
        status=status,
        detail=detail,
        instance=instance,
        errors=list(errors),
    )
    return JSONResponse(body.model_dump(mode="json"), status, dict(headers or {}), media_type=PROBLEM_TYPE)


async def on_rejected(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, Rejected)
    errors = [Invalid(field=exc.field, detail=exc.detail, way_out=exc.way_out)] if exc.field or exc.way_out else []
    return problem(exc.status, exc.code, str(exc), instance=request.url.path, errors=errors)


async def on_unprocessable(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, Unprocessable)
    return _unprocessable(request, exc.errors)


async def on_request_validation(request: Request, exc: Exception) -> Response:
    """Parameters and bodies that FastAPI validated itself: the part (body, query, path) is dropped from pointers."""
    assert isinstance(exc, RequestValidationError)
    found = exc.errors()
    if found and found[0].get("type") == "json_invalid":
        return problem(400, "malformed_json", "the body is not valid JSON", instance=request.url.path)
    errors = [to_invalid({**error, "loc": tuple(error.get("loc", ()))[1:]}) for error in found]
    return _unprocessable(request, errors)


async def on_conflict(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, Conflict)
    return problem(
        409, "conflict", str(exc) or "somebody else changed this at the same time", instance=request.url.path
    )


async def on_unavailable(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, (Unavailable, LeaseLost))
    seconds = exc.retry_after_seconds if isinstance(exc, Unavailable) else 1.0
    _log.warning("request_unavailable", path=request.url.path, detail=str(exc))
    detail = str(exc) or "this process is not the active one"
    headers = {"Retry-After": str(max(1, round(seconds)))}
    return problem(503, "unavailable", detail, instance=request.url.path, headers=headers)


async def on_http_exception(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    status = exc.status_code
    detail = str(exc.detail) if exc.detail else _TITLES.get(status, "Error")
    if status == 404 and detail == "Not Found":
        detail = "there is nothing at this address"
    code = _CODES.get(status, f"http_{status}")
    return problem(status, code, detail, instance=request.url.path, headers=exc.headers)


async def on_crash(request: Request, exc: Exception) -> Response:
    _log.error("request_crashed", path=request.url.path, method=request.method, exc_info=exc)
    return problem(500, "internal_error", "an internal error; the service's log has it", instance=request.url.path)


def _unprocessable(request: Request, errors: Sequence[Invalid]) -> Response:
    status = HTTP_422_UNPROCESSABLE_CONTENT
    return problem(status, "invalid_request", _first_of(errors), instance=request.url.path, errors=errors)


def _first_of(errors: Sequence[Invalid]) -> str:
    first = errors[0] if errors else Invalid(field="", detail="invalid request")
    detail = f"{first.field}: {first.detail}" if first.field else first.detail
    return f"{detail} (and {len(errors) - 1} more)" if len(errors) > 1 else detail


_BY_TYPE: Final = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "missing": "this field is required",
    "datetime_type": "a time such as 2030-01-31T12:00:00Z",
    "datetime_parsing": "a time such as 2030-01-31T12:00:00Z",
    "datetime_from_date_parsing": "a time such as 2030-01-31T12:00:00Z",
}
_LIMITS: Final = (
    ("ge", "at least {}"),
    ("gt", "more than {}"),
    ("le", "at most {}"),
    ("lt", "less than {}"),
    ("min_length", "at least {} long"),
    ("max_length", "at most {} long"),
    ("pattern", "must match {}"),
    ("expected", "one of {}"),
)


def _way_out(
    kind: str, context: Mapping[str, Any], location: tuple[int | str, ...], model: type[BaseModel] | None
) -> str:
    if kind in _BY_TYPE:
        return _BY_TYPE[kind]
    if kind == "extra_forbidden":
        names = _field_names(model, location[:-1])
        return f"known fields: {', '.join(names)}" if names else "remove this field"
    return next((text.format(context[key]) for key, text in _LIMITS if key in context), "")


def _field_names(model: type[BaseModel] | None, path: tuple[int | str, ...]) -> list[str]:
    """Names of the fields of the model at ``path`` below ``model``; empty where that cannot be told."""
    for part in path:
        field = model.model_fields.get(str(part)) if model else None
        inner = field.annotation if field else None
        model = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None
    return sorted(model.model_fields) if model else []

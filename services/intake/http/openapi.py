"""The OpenAPI document: bodies that the routes parse by hand are described here."""

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from schemas.api.jobs import BulkJob, CancelJob, GapView, LogLineView, PatchJob, Problem, ServerEvent, SubmitJob
from services.intake.http.bodies import YAML_TYPES
from shared.problems import PROBLEM_TYPE

_BY_HAND: Final[tuple[type[BaseModel], ...]] = (
    SubmitJob,
    BulkJob,
    PatchJob,
    CancelJob,
    ServerEvent,
    GapView,
    LogLineView,
    Problem,
)
_REF: Final = "#/components/schemas/{model}"
_ERRORS: Final = {
    400: "Not understood: malformed JSON or YAML",
    404: "No such job here",
    409: "The job has ended, or somebody else changed it",
    412: "The job has another version than If-Match says",
    413: "The body is too large",
    415: "Neither JSON nor YAML",
    422: "Invalid: every field that is wrong, with the way out",
    429: "Too much at once: come again after Retry-After",
    503: "A part of the system is away: come again after Retry-After",
}

Responses = dict[int | str, dict[str, Any]]


def takes(
    model: type[BaseModel], *, required: bool = True, or_list_of: type[BaseModel] | None = None
) -> dict[str, Any]:
    """``openapi_extra`` of a route that reads its own body."""
    shape: dict[str, Any] = {"$ref": _REF.format(model=model.__name__)}
    if or_list_of is not None:
        items = {"$ref": _REF.format(model=or_list_of.__name__)}
        shape = {"oneOf": [shape, {"type": "array", "minItems": 1, "items": items}]}
    schema = {"schema": shape}
    return {
        "requestBody": {
            "required": required,
            "content": dict.fromkeys(("application/json", YAML_TYPES[0], YAML_TYPES[2]), schema),
        }
    }


def answers(*, problems: tuple[int, ...], **described: Any) -> Responses:
    """Documented responses; ``described`` by status: ``ok_201=JobView`` or ``ok_200=(description, content)``."""
    responses: Responses = {}
    for name, what in described.items():
        status = int(name.removeprefix("ok_"))
        if isinstance(what, tuple):
            responses[status] = {"description": what[0], "content": what[1]}
        else:
            told = getattr(what, "__args__", (what,))[0]  # of a union the first says it
            responses[status] = {"description": str(told.__doc__).partition("\n")[0], "model": what}
    for status in problems:
        content = {PROBLEM_TYPE: {"schema": {"$ref": _REF.format(model=Problem.__name__)}}}
        responses[status] = {"description": _ERRORS[status], "content": content}
    return responses


def text_of(model: type[BaseModel], *kinds: str) -> Mapping[str, Any]:
    """The content of a streamed answer, each item of which is the model."""
    return {kind: {"schema": {"$ref": _REF.format(model=model.__name__)}} for kind in kinds}


def document_with_bodies(app: FastAPI) -> None:
    """Let ``app.openapi`` add the models that no route declares to FastAPI."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for model in _BY_HAND:
                described = model.model_json_schema(ref_template=_REF)
                for name, inner in described.pop("$defs", {}).items():
                    schemas.setdefault(name, inner)
                schemas[model.__name__] = described
            _drop_automatic_errors(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document


def _drop_automatic_errors(document: dict[str, Any]) -> None:
    """FastAPI promises a 422 of its own shape wherever there is a parameter; ours are declared, and are problems."""
    for path in document["paths"].values():
        for operation in path.values():
            content = operation["responses"].get("422", {}).get("content", {})
            if content.get("application/json", {}).get("schema", {}).get("$ref", "").endswith("/HTTPValidationError"):
                del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)

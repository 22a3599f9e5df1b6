"""The OpenAPI 3.1 document of the admin API, generated from its operations and their structs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stencilpress import __version__
from stencilpress.gateway.access import ADMIN_PREFIX, PERMISSIONS
from stencilpress.gateway.api.admin.operation import JSON, Operation

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_REFERENCE = "#/components/schemas/{name}"


class ErrorFields(msgspec.Struct, frozen=True):
    """What went wrong; `param` names the field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """Every answer that is no success. Some carry more fields, such as an upload's `findings`."""

    error: ErrorFields


def openapi_document(operations: Sequence[Operation]) -> dict[str, Any]:
    """The document as JSON-able objects."""
    types = _distinct([ErrorBody, *(kind for one in operations for kind in (one.body, one.answer) if _is_schema(kind))])
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    references = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        described = _operation(one, references)
        paths.setdefault(one.path, {})[one.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Stencilpress admin API",
            "version": __version__,
            "description": "Tenants, keys, adapters and their history. Errors have the shape of OpenAI's API.",
        },
        "servers": [{"url": ADMIN_PREFIX}],
        "security": [{"key": []}],
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "An API key."}},
        },
    }


def _operation(one: Operation, references: dict[str, Any]) -> dict[str, Any]:
    roles = ", ".join(role.value for role, allowed in PERMISSIONS.items() if one.needs in allowed)
    described: dict[str, Any] = {
        "operationId": one.id,
        "summary": one.summary,
        "description": "\n\n".join(filter(None, [one.description, f"Roles: {roles}."])),
        "parameters": [*_path_parameters(one.path), *query_parameters(one.query)],
        "responses": {
            str(one.status): {"description": "Done.", "content": {one.produces: {"schema": _answer(one, references)}}},
            "default": {"description": "Refused.", "content": {JSON: {"schema": references[repr(ErrorBody)]}}},
        },
    }
    if one.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": references[repr(one.body)]}}}
    elif one.accepts:
        raw: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
        described["requestBody"] = {"required": True, "content": dict.fromkeys(one.accepts, raw)}
    return described


def _answer(one: Operation, references: dict[str, Any]) -> Any:
    return references[repr(one.answer)] if _is_schema(one.answer) else {"type": "string", "format": "binary"}


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PLACEHOLDER.findall(path)
    ]


def query_parameters(query: type[Any] | None) -> list[dict[str, Any]]:
    """What a query string may have, as OpenAPI's parameter objects."""
    if query is None:
        return []
    _, components = msgspec.json.schema_components([query], ref_template="#/{name}")
    fields = _inlined(components[query.__name__], components)
    return [
        {"name": name, "in": "query", "required": name in fields.get("required", ()), "schema": described}
        for name, described in fields["properties"].items()
    ]


def _inlined(schema: Any, components: Mapping[str, Any]) -> Any:
    """A schema with what it refers to in its place: parameters are described where they stand."""
    if isinstance(schema, list):
        return [_inlined(one, components) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return components[schema["$ref"].removeprefix("#/")]
    return {name: _inlined(one, components) for name, one in schema.items()}


def _is_schema(kind: Any) -> bool:
    origin = getattr(kind, "__origin__", kind)
    return isinstance(origin, type) and issubclass(origin, msgspec.Struct)


def _distinct(types: Sequence[Any]) -> list[Any]:
    return list({repr(kind): kind for kind in types}.values())

"""HTML forms: reading one, and turning it into the struct that an operation takes, with a text for each bad field."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin
from urllib.parse import parse_qsl

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType
from multidict import MultiDict, MultiDictProxy

from stencilpress.gateway.api.body import read_body
from stencilpress.gateway.errors import ApiError, InvalidRequestError, UnsupportedMediaTypeError
from stencilpress.gateway.services import SERVICES

URLENCODED = "application/x-www-form-urlencoded"
MAX_FIELDS = 1000
_FORM = web.RequestKey("form", MultiDictProxy[str])
_LIST = re.compile(r"[\s,]+")

T = TypeVar("T", bound=msgspec.Struct)


class FormError(InvalidRequestError):
    """Fields that do not fit. ``errors`` has a text for each, by name."""

    def __init__(self, errors: Mapping[str, str]) -> None:
        field, text = next(iter(errors.items()))
        super().__init__(f"{field}: {text}", param=field)
        self.errors = dict(errors)


async def read_form(request: web.Request) -> MultiDictProxy[str]:
    """The fields of the request's form, read once.

    Raises :class:`UnsupportedMediaTypeError`, :class:`RequestTooLargeError`, :class:`InvalidRequestError`.
    """
    if _FORM not in request:
        if request.content_type != URLENCODED:
            raise UnsupportedMediaTypeError(f"A form is sent as {URLENCODED}.")
        body = await read_body(request, request.app[SERVICES].settings)
        try:
            fields = parse_qsl(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
        except ValueError:
            raise InvalidRequestError("The form is malformed.") from None
        request[_FORM] = MultiDictProxy(MultiDict(fields))
    return request[_FORM]


def to_struct(form: MultiDictProxy[str], kind: type[T], **fixed: Any) -> T:
    """The struct whose fields the form names; ``fixed`` are not the form's to choose.

    An empty field is null where that is allowed, else as if it were not there. A list is one field several times, or
    one text with commas or spaces between. A field that the form lacks is left out. Raises :class:`FormError`.
    """
    values: dict[str, Any] = dict(fixed)
    errors: dict[str, str] = {}
    for field in msgspec.structs.fields(kind):
        if field.name in fixed:
            continue
        try:
            value = _value(form, field)
            if value is not UNSET:
                values[field.name] = value
        except msgspec.ValidationError as error:
            errors[field.name] = str(error)
        else:
            if value is UNSET and field.required:
                errors[field.name] = "is needed"
    if errors:
        raise FormError(errors)
    return kind(**values)


class Shown(dict[str, Any]):
    """Values or texts by field for a template; a field that is not there is an empty text."""

    def __missing__(self, field: str) -> str:
        return ""


def shown_again(form: MultiDictProxy[str]) -> Shown:
    """What a person typed, for the form that is shown again with its errors. The last of several values counts."""
    return Shown(form.items())


def errors_of(error: ApiError | None) -> Shown:
    """What to show beside each field of a form, by name; "" is the form as a whole."""
    if error is None:
        return Shown()
    if isinstance(error, FormError):
        return Shown(error.errors)
    param = error.param or ""
    return Shown({param: error.message.removeprefix(f"{param}: ") if param else error.message})


def _value(form: MultiDictProxy[str], field: msgspec.structs.FieldInfo) -> Any:
    if field.name not in form:
        return UNSET
    texts = [text.strip() for text in form.getall(field.name)]
    plain, nullable = _plain(field.type)
    if plain is list:
        items = texts if len(texts) > 1 else _LIST.split(texts[0])
        items = [item for item in items if item]
        return msgspec.convert(items if items or not nullable else None, field.type, strict=False)
    if texts[-1] == "" and nullable:
        return None
    if texts[-1] == "" and plain is not str:
        return UNSET
    return msgspec.convert(texts[-1], field.type, strict=False)


def _plain(kind: Any) -> tuple[Any, bool]:
    """The type of a field without its annotations, and whether it may be null."""
    if get_origin(kind) is Annotated:
        return _plain(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        parts = [part for part in get_args(kind) if part is not UnsetType]
        found = [_plain(part) for part in parts if part is not type(None)]
        return found[0][0], len(parts) > len(found) or any(nullable for _, nullable in found)
    return get_origin(kind) or kind, False

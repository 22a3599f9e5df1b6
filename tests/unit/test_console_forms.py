"""Forms become the structs of operations; the menu shows what exists; texts that lead elsewhere do not."""

from __future__ import annotations

from typing import Annotated

import msgspec
import pytest
from msgspec import UNSET, Meta, UnsetType
from multidict import MultiDict, MultiDictProxy

from stencilpress.gateway.access import Role
from stencilpress.gateway.api.admin.views import LimitChanges, NewKey
from stencilpress.gateway.errors import ConflictError, InvalidRequestError
from stencilpress.web.account import browser_name
from stencilpress.web.forms import FormError, errors_of, to_struct
from stencilpress.web.nav import OF_ALL, OF_TENANT, menu
from stencilpress.web.visitor import Visitor

EVERY_PATH = {path for _, _, path in (*OF_ALL, *OF_TENANT)}


class Thing(msgspec.Struct, frozen=True, kw_only=True):
    name: Annotated[str, Meta(max_length=5)]
    count: Annotated[int, Meta(ge=1)] | None = None
    share: float = 0.5
    on: bool = False
    tags: list[str] | None = None
    left: Annotated[int, Meta(ge=0)] | UnsetType = UNSET


def form(*pairs: tuple[str, str]) -> MultiDictProxy[str]:
    return MultiDictProxy(MultiDict(pairs))


def visitor(role: Role) -> Visitor:
    return Visitor("x" * 12, "ada@example.com", role, "acme", 1, "y" * 12, "token")


def test_texts_become_the_types_of_the_struct() -> None:
    given = form(
        ("name", " abc "), ("count", "3"), ("share", "0.25"), ("on", "true"), ("tags", "a, b c"), ("left", "7")
    )
    assert to_struct(given, Thing) == Thing(name="abc", count=3, share=0.25, on=True, tags=["a", "b", "c"], left=7)


def test_an_empty_field_is_null_or_left_out() -> None:
    empty = form(("name", "a"), ("count", ""), ("share", ""), ("tags", ""), ("left", ""))
    assert to_struct(empty, Thing) == Thing(name="a", count=None, share=0.5, tags=None, left=UNSET)
    limits = to_struct(form(("max_tokens", ""), ("max_rank", "")), LimitChanges)
    assert (limits.max_tokens, limits.max_rank) == (None, UNSET)


def test_a_list_may_be_a_field_several_times() -> None:
    given = form(("role", "caller"), ("routes", "/v1/models"), ("routes", "/v1/completions"))
    assert to_struct(given, NewKey).routes == ["/v1/models", "/v1/completions"]


def test_every_bad_field_has_its_text() -> None:
    with pytest.raises(FormError) as refused:
        to_struct(form(("name", "too long"), ("count", "none"), ("share", "x"), ("left", "-1")), Thing)
    assert set(refused.value.errors) == {"name", "count", "share", "left"}
    assert errors_of(refused.value) == refused.value.errors
    with pytest.raises(FormError) as missing:
        to_struct(form(), Thing)
    assert missing.value.errors == {"name": "is needed"}


def test_a_form_does_not_choose_what_is_fixed() -> None:
    assert to_struct(form(("name", "evil")), Thing, name="good").name == "good"


def test_an_error_of_an_operation_stands_beside_its_field() -> None:
    assert errors_of(InvalidRequestError("label: is bad", param="label")) == {"label": "is bad"}
    assert errors_of(ConflictError("no")) == {"": "no"}
    assert errors_of(None)["anything"] == ""


def test_the_menu_has_pages_that_exist_for_whom_they_are() -> None:
    groups = menu(visitor(Role.OPERATOR), "adapters", None, EVERY_PATH, {})
    assert [group.label for group in groups] == [""]
    assert [item.label for item in groups[0].items if item.current] == ["Adapters"]
    general, tenant = menu(visitor(Role.OPERATOR), "adapters", "other", EVERY_PATH, {})
    assert not [item for item in general.items if item.current]
    assert [item.href for item in tenant.items if item.current] == ["/console/t/other/adapters"]
    [own] = menu(visitor(Role.ADMIN), "account", None, EVERY_PATH, {})
    assert own.label == "acme"
    assert "Chat" in [item.label for item in own.items]
    [viewers] = menu(visitor(Role.VIEWER), "usage", "acme", EVERY_PATH, {})
    assert "Chat" not in [item.label for item in viewers.items]
    assert menu(visitor(Role.ADMIN), "", None, {"/console/tenants"}, {}) == []
    assert menu(None, "", None, EVERY_PATH, {}) == []


@pytest.mark.parametrize(
    ("agent", "name"),
    [
        ("Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0", "Firefox on Linux"),
        ("Mozilla/5.0 (Windows NT 10.0) AppleWebKit/537.36 Chrome/140.0 Safari/537.36 Edg/140.0", "Edge on Windows"),
        ("Mozilla/5.0 (iPhone; CPU iPhone OS 18_0 like Mac OS X) Version/18.0 Safari/604.1", "Safari on iPhone"),
        ("Mozilla/5.0 (Linux; Android 15) AppleWebKit/537.36 Chrome/140.0 Safari/537.36", "Chrome on Android"),
        ("curl/8.5.0", "Another browser"),
        ("", "Another browser"),
    ],
)
def test_browsers_have_the_names_that_people_know(agent: str, name: str) -> None:
    assert browser_name(agent) == name

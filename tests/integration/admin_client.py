"""A client of the admin API that holds every answer against the OpenAPI document."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator

from stencilpress.gateway.access import ADMIN_PREFIX, Role
from stencilpress.gateway.api.admin.openapi import openapi_document
from stencilpress.gateway.api.admin.router import OPERATIONS
from stencilpress.gateway.keys import issue_key
from tests.integration.gateway_harness import Gateway

DOCUMENT = json.loads(json.dumps(openapi_document(OPERATIONS)))


@dataclass(frozen=True)
class AdminClient:
    """Asks with one key."""

    gateway: Gateway
    key: str

    async def __call__(self, method: str, path: str, body: Any = None, *, status: int = 200) -> Any:
        """The answer to one request, which must have ``status`` and the shape that the document promises."""
        found, text = await self.raw(method, path, body)
        assert found == status, text
        answer = json.loads(text)
        _check(method, path.partition("?")[0], status, answer)
        return answer

    async def raw(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {self.key}"}
        data = None if body is None else json.dumps(body).encode()
        url = f"{self.gateway.url}{ADMIN_PREFIX}{path}"
        async with self.gateway.http.request(method, url, data=data, headers=headers) as response:
            return response.status, await response.text()


async def admin_client(gateway: Gateway, tenant: str, role: Role) -> AdminClient:
    """With a fresh key of a tenant."""
    return AdminClient(gateway, (await issue_key(gateway.services.db, tenant, role=role)).token)


def _check(method: str, path: str, status: int, answer: Any) -> None:
    described = next(
        described
        for pattern, described in DOCUMENT["paths"].items()
        if _matches(pattern, path) and method.lower() in described
    )[method.lower()]
    responses = described["responses"]
    schema = responses.get(str(status), responses["default"])["content"]["application/json"]["schema"]
    Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(answer)


def _matches(pattern: str, path: str) -> bool:
    return re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", pattern), path) is not None

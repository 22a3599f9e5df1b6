"""What a client is told when the engine ends a request with an error."""

from __future__ import annotations

import json

import pytest

from stencilpress.engine.messages import Finished
from stencilpress.gateway.errors import from_finished


@pytest.mark.parametrize(
    ("code", "status", "told", "retry"),
    [
        ("adapter_unavailable", 503, "adapter_unavailable", "60"),
        ("context_exceeded", 400, "context_length_exceeded", None),
        ("capacity", 400, "capacity_exceeded", None),
        ("overloaded", 503, "server_is_overloaded", "1"),
        ("deadline", 503, "deadline_exceeded", "1"),
        ("engine_lost", 503, "engine_lost", "1"),
        ("internal", 500, "internal_error", None),
        ("of another version", 500, "internal_error", None),
    ],
)
def test_each_code_of_the_engine_has_a_status_and_a_text_of_ours(
    code: str, status: int, told: str, retry: str | None
) -> None:
    error = from_finished(Finished(1, "error", 3, 0, code=code, message="/var/lib/x: KeyError at 0x7f"))
    body = json.loads(error.body())["error"]
    assert (error.status, body["code"], error.headers.get("Retry-After")) == (status, told, retry)
    assert (error.headers.get("x-should-retry") == "false") == (code in ("adapter_unavailable", "deadline"))
    assert body.keys() == {"message", "type", "param", "code"}
    assert "KeyError" not in body["message"]
    assert "/var" not in body["message"]

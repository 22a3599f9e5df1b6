"""The requests that an engine has not answered in full, and the gateways that they came from."""

from __future__ import annotations

from collections.abc import Iterable

from stencilpress.engine.plan import RequestKey
from stencilpress.engine.request import Request


class Register:
    """By key, and by connection. ``parked`` are connections whose reply rings are full: nothing is planned for them."""

    def __init__(self) -> None:
        self.parked: set[int] = set()
        self._requests: dict[RequestKey, Request] = {}
        self._connections: dict[int, dict[RequestKey, Request]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._requests

    def get(self, key: RequestKey) -> Request | None:
        """None if it has ended, or never came."""
        return self._requests.get(key)

    def add(self, request: Request) -> None:
        """One has come; its key is new."""
        self._requests[request.key] = request
        self._connections.setdefault(request.key[0], {})[request.key] = request

    def remove(self, request: Request) -> None:
        """It has ended."""
        connection = request.key[0]
        del self._requests[request.key]
        mine = self._connections[connection]
        del mine[request.key]
        if not mine:
            del self._connections[connection]

    def all_keys(self) -> list[RequestKey]:
        """A copy of all."""
        return list(self._requests)

    def keys_of(self, connection: int) -> list[RequestKey]:
        """A copy of a connection's."""
        return list(self._connections.get(connection, ()))

    def standing(self, connection: int) -> list[Request]:
        """A connection's requests that are not seated."""
        return [request for request in self._connections.get(connection, {}).values() if not request.seated]

    def is_parked(self, request: Request) -> bool:
        """Whether its gateway is."""
        return request.key[0] in self.parked

    def of_parked(self, requests: Iterable[Request]) -> list[Request]:
        """Those of parked gateways."""
        return [request for request in requests if request.key[0] in self.parked] if self.parked else []

from __future__ import annotations

import pytest

from tests.unit.simulator import Storm


@pytest.mark.parametrize("seed", range(60))
def test_storm(seed: int) -> None:
    engine = Storm(seed).run(400)
    assert engine.pool.kv == 0
    assert all(client.finished is not None for client in engine.clients.values())

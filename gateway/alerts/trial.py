"""A test notification, sent at once."""

from __future__ import annotations

from datetime import UTC, datetime

from stencilpress.gateway.alerts.courier import Courier, send
from stencilpress.gateway.alerts.notification import trial
from stencilpress.gateway.catalog.alert_outbox import Webhook


async def try_webhook(hook: Webhook, receiver: str, *, private: bool, trusted: bool = False) -> str:
    """Tell a webhook of nothing; returns "" if it took that, else why not. Options as :class:`Courier` has them."""
    now = datetime.now(UTC)
    async with Courier(private=private) as courier:
        message_id = f"msg_test_{int(now.timestamp() * 1000)}"
        return await send(courier, hook.url, hook.secret, message_id, trial(receiver, now), trusted=trusted)

"""What a client is told of its quota: headers on every response, and the error of a refusal."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from stencilpress.gateway.errors import InsufficientQuotaError, RateLimitError
from stencilpress.gateway.quota.plan import Quota
from stencilpress.gateway.quota.terms import Ask, Dimension, Outcome

_WHAT: dict[Dimension, str] = {
    "concurrent_streams": "requests in progress at once",
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "tokens per minute",
    "tokens_per_day": "tokens per day",
    "tokens_per_month": "tokens per month",
}


def rate_headers(quota: Quota, outcome: Outcome) -> dict[str, str]:
    """``x-ratelimit-*`` of the two limits per minute, where the plan has them. Resets are until nothing is used."""
    headers: dict[str, str] = {}
    levels = (
        ("requests", quota.requests_per_minute, outcome.requests_used, outcome.requests_reset_ms),
        ("tokens", quota.tokens_per_minute, outcome.tokens_used, outcome.tokens_reset_ms),
    )
    for name, limit, used, reset_ms in levels:
        if limit is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(limit - used, 0))
            headers[f"x-ratelimit-reset-{name}"] = duration(reset_ms)
    return headers


def refusal(ask: Ask, outcome: Outcome, dimension: Dimension) -> RateLimitError:
    """The 429 that names the dimension, its limit and what would help."""
    limit = getattr(ask.quota, dimension)
    text = f"Limit reached: {limit} {_WHAT[dimension]}"
    if dimension.startswith("tokens"):
        text += f", of which {outcome.left} are left, and this request may use up to {ask.tokens}"
    headers = rate_headers(ask.quota, outcome)
    if outcome.retry_ms:
        text += f". Try again in {duration(outcome.retry_ms)}."
        return RateLimitError(text, dimension=dimension, retry_ms=outcome.retry_ms, headers=headers)
    if dimension in ("tokens_per_day", "tokens_per_month"):
        span = ask.periods.day if dimension == "tokens_per_day" else ask.periods.month
        end = datetime.fromtimestamp(span.end, UTC).astimezone(ZoneInfo(ask.quota.time_zone))
        return InsufficientQuotaError(
            f"{text}. The budget begins anew at {end.isoformat()}.", dimension=dimension, headers=headers
        )
    return RateLimitError(f"{text}. {_advice(dimension, limit)}", dimension=dimension, headers=headers)


def _advice(dimension: Dimension, limit: int) -> str:
    if dimension == "tokens_per_minute" and limit:
        return "It can never be admitted: shorten the prompt or lower max_tokens."
    return "Nothing is admitted."


def duration(ms: int) -> str:
    """As OpenAI writes it: ``12ms``, ``1.5s``, ``6m0s``."""
    if ms < 1000:
        return f"{ms}ms"
    if ms < 60_000:
        return f"{ms / 1000:g}s"
    seconds = -(-ms // 1000)
    return f"{seconds // 60}m{seconds % 60}s"

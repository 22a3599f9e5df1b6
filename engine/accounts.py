"""What each tenant has had: virtual token counters (Sheng et al., "Fairness in Serving Large Language Models",
arXiv 2401.00588).

A tenant's counter grows by the price of each token computed or drawn for it, divided by its weight; the tenant with
the least counter is served first, whichever gateways its requests come through. A tenant that begins to wait is
lifted to the *virtual time*, so that it cannot save up what it has not used. Where the paper lifts to the least
counter among those who wait, virtual time here also advances with what is served: otherwise an endless row of new
tenants, each lifted to the same least counter, would hold up whoever stands above it for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stencilpress.engine.plan import RequestKey

if TYPE_CHECKING:
    from stencilpress.engine.request import Request

PROMPT_PRICE = 1
ANSWER_PRICE = 2
"""Of a token of the answer, beside one of the prompt: the paper's, and that of most price lists."""
MAX_IDLE = 4096
"""Tenants without requests whose debts are remembered; the longest idle is forgotten first."""


@dataclass(slots=True, eq=False)
class Account:
    """A tenant's ``counter``, in priced tokens a unit of weight, and its requests: ``live`` in all, some ``waiting``.

    ``queued`` and ``begun`` are the costs of all its requests that ever waited, and of those that wait no longer.
    ``owed`` is the part of the cost of those that are seated which has not been charged yet. ``credit`` was charged for
    what was drawn in vain and makes the next tokens cheaper: the counter itself never falls, since lines rest on that.
    """

    tenant: int
    weight: float
    counter: float = 0.0
    live: int = 0
    waiting: dict[RequestKey, Request] = field(default_factory=dict)
    queued: float = 0.0
    begun: float = 0.0
    owed: float = 0.0
    credit: float = 0.0

    def charge(self, price: float) -> float:
        """Put a price on the account. Returns what is left of it after the credit."""
        credited = min(price, self.credit)
        self.credit -= credited
        self.counter += (price - credited) / self.weight
        return price - credited

    def standing(self, ahead: float) -> float:
        """The counter that it will have once those seated, and then requests that cost ``ahead``, have been served.

        So a request's standing stays what it is while those before it are served in their order.
        """
        return self.counter + (self.owed + ahead) / self.weight


class Accounts:
    """The tenants who have requests, and those who still owe for earlier ones."""

    def __init__(self) -> None:
        self._accounts: dict[int, Account] = {}
        self._idle: OrderedDict[int, Account] = OrderedDict()
        self._waiting: dict[int, Account] = {}
        self._waiting_weight = 0.0
        self._virtual_time = 0.0

    def open(self, tenant: int, weight: float) -> Account:
        """The account of a request that has come; its weight is the tenant's from now on. Close it once."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(tenant, weight)
        if account.weight != weight:
            if tenant in self._waiting:
                self._waiting_weight += weight - account.weight
            account.weight = weight
        account.live += 1
        self._idle.pop(tenant, None)
        return account

    def close(self, account: Account) -> None:
        """One of its requests has ended."""
        account.live -= 1
        if account.live:
            return
        if not self._in_debt(account):
            del self._accounts[account.tenant]
            return
        self._idle[account.tenant] = account
        if len(self._idle) > MAX_IDLE:
            tenant, _ = self._idle.popitem(last=False)
            del self._accounts[tenant]

    def wait(self, request: Request) -> None:
        """A request begins to wait, or does again."""
        account = request.account
        if not account.waiting:
            self._lift(account)
            self._waiting[account.tenant] = account
            self._waiting_weight += account.weight
        account.waiting[request.key] = request
        request.ahead = account.queued if request.unbegun and request.priority <= 0 else account.begun
        account.queued += request.cost

    def stop_waiting(self, request: Request) -> None:
        """It has a seat, or has ended."""
        account = request.account
        del account.waiting[request.key]
        account.begun += request.cost
        if account.waiting:
            return
        account.queued = account.begun = 0.0
        del self._waiting[account.tenant]
        self._waiting_weight -= account.weight
        if not self._waiting:
            self._waiting_weight = 0.0
            self._virtual_time = max(self._virtual_time, account.counter)

    def waiting(self) -> Iterator[Account]:
        """Those of tenants who have requests that wait. A live view: do not keep it."""
        return iter(self._waiting.values())

    @property
    def virtual_time(self) -> float:
        """The counter at which a tenant begins."""
        return self._virtual_time

    def served(self, price: float) -> None:
        """A step computes tokens of this price, all tenants together."""
        if self._waiting:
            self._virtual_time += price / self._waiting_weight

    def loser(self, newcomer: Request) -> Request:
        """Who has no place in a full queue: the last request of the tenant with most waiting for its weight that has
        not begun; the newcomer itself, if that is its tenant or there is none."""
        longest = max(self._waiting.values(), key=lambda account: len(account.waiting) / account.weight)
        mine = newcomer.account
        if (len(mine.waiting) + 1) / mine.weight >= len(longest.waiting) / longest.weight:
            return newcomer
        unbegun = (request for request in longest.waiting.values() if request.unbegun)
        return max(unbegun, key=lambda request: request.urgency, default=newcomer)

    def _in_debt(self, account: Account) -> bool:
        """Whether it would begin anew with less than it has had. Virtual time alone does not tell: it may be ahead of
        those who wait, and comes back to them."""
        if account.counter > self._virtual_time:
            return True
        return any(waiting.counter < account.counter for waiting in self._waiting.values())

    def _lift(self, account: Account) -> None:
        """Virtual time never leaves the counters of those who wait: nobody begins far before or behind them all."""
        if self._waiting:
            counters = [waiting.counter for waiting in self._waiting.values()]
            self._virtual_time = min(max(self._virtual_time, min(counters)), max(counters))
        account.counter = max(account.counter, self._virtual_time)

"""Who gives way: the shelf against a sorted list, worth, and tenants' shares."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stencilpress.engine.eviction import COMPACT_AT, HEAT_HALF_LIFE_S, WARM_S, Heat, Item, Room, Shelf


class Thing(Item):
    """An item that notes its eviction."""

    def __init__(self, room: Room, tenant: int, size: int, name: str = "") -> None:
        super().__init__(tenant, size)
        self.room = room
        self.name = name
        self.evicted = False
        room.charge(tenant, size)

    def idle(self, cost: float = 1.0, uses: float = 0.0, used_s: float = 0.0) -> Thing:
        self.worth = self.room.worth(cost, uses)
        self.used_s = used_s
        self.room.adapters.file(self)
        return self

    def evict(self) -> None:
        self.room.adapters.take(self)
        self.room.charge(self.tenant, -self.size)
        self.evicted = True


def reclaim(room: Room, size: int, tenant: int = 0, *, over: bool = False) -> int:
    return room.reclaim((room.adapters, room.cached), size, tenant, over=over)


def test_heat_forgets_half_in_its_half_life() -> None:
    heat = Heat()
    assert heat.at(5.0) == 0
    heat.add(10.0)
    heat.add(10.0)
    assert heat.at(10.0 + HEAT_HALF_LIFE_S) == 1
    heat.add(10.0 + HEAT_HALF_LIFE_S)
    assert heat.at(10.0 + HEAT_HALF_LIFE_S) == 2


def test_what_is_seldom_used_or_cheap_to_bring_back_goes_first() -> None:
    room = Room(clock=lambda: 0.0)
    often, dear, cheap = (Thing(room, 1, 2, name) for name in ("often", "dear", "cheap"))
    often.idle(uses=30)
    dear.idle(cost=8)
    cheap.idle()
    assert reclaim(room, 1) == 2
    assert cheap.evicted
    assert reclaim(room, 3) == 4


def test_what_was_once_worth_much_sinks_when_it_is_not_used() -> None:
    room = Room(clock=lambda: 0.0)
    old = Thing(room, 1, 1).idle(uses=100)
    newcomers = 0
    while not old.evicted:
        Thing(room, 1, 1).idle(uses=1)
        reclaim(room, 1)
        newcomers += 1
        assert newcomers < 100
    assert newcomers > 3


def test_a_shelf_that_nobody_takes_from_for_long_keeps_no_traces_of_what_came_and_went() -> None:
    room = Room(clock=lambda: 0.0)
    things = [Thing(room, tenant, 1) for tenant in range(10)]
    for _ in range(1000):
        for thing in things:
            thing.idle()
        for thing in things:
            room.adapters.take(thing)
    for thing in things[:3]:
        thing.idle()
    assert len(room.adapters._fronts) <= 2 * len(things) + COMPACT_AT
    assert reclaim(room, 10) == 3
    assert [thing.evicted for thing in things] == [True] * 3 + [False] * 7


def test_a_tenant_over_its_share_takes_from_those_over_theirs() -> None:
    room = Room(clock=lambda: 0.0)
    small = [Thing(room, 1, 1).idle() for _ in range(2)]
    large = [Thing(room, 2, 1).idle(uses=9) for _ in range(6)]
    asker = [Thing(room, 3, 1).idle(uses=9) for _ in range(6)]
    assert room.exceeds(3)
    assert not room.exceeds(1)
    assert room.reachable(room.adapters, 3, over=True) == 12
    assert reclaim(room, 99, 3, over=True) > 0
    assert not any(thing.evicted for thing in small), "though they are worth least"
    assert any(thing.evicted for thing in large), "down to its share"
    assert not all(thing.evicted for thing in large)
    assert all(thing.evicted for thing in asker)


def test_nobody_is_spared_for_what_has_been_cold_for_long() -> None:
    now_s = 1000.0
    room = Room(clock=lambda: now_s)
    cold, warm = Thing(room, 1, 1).idle(used_s=now_s - WARM_S), Thing(room, 2, 1).idle(used_s=now_s)
    asker = [Thing(room, 3, 1) for _ in range(5)]
    assert room.exceeds(3)
    reclaim(room, 2, 3, over=True)
    assert (cold.evicted, warm.evicted) == (True, False)
    assert not any(thing.evicted for thing in asker), "none of them idles"


def test_the_first_of_a_tenant_exceeds_nothing() -> None:
    room = Room(clock=lambda: 0.0)
    for tenant in (1, 2):
        Thing(room, tenant, 1)
    assert not room.exceeds(3, 50)


class ShelfMachine(RuleBasedStateMachine):
    """The shelf's order is that of a sorted list, whatever is filed and taken between."""

    @initialize()
    def start(self) -> None:
        self.shelf = Shelf()
        self.filed: list[Item] = []
        self.off: list[Item] = []

    @rule(tenant=st.integers(1, 3), worth=st.integers(0, 4), size=st.integers(1, 3))
    def file_new(self, tenant: int, worth: int, size: int) -> None:
        item = Item(tenant, size)
        item.worth = worth
        self.shelf.file(item)
        self.filed.append(item)

    @precondition(lambda self: self.off)
    @rule(data=st.data(), worth=st.integers(0, 4))
    def file_again(self, data: st.DataObject, worth: int) -> None:
        item = self.off.pop(data.draw(st.integers(0, len(self.off) - 1)))
        item.worth = worth
        self.shelf.file(item)
        self.filed.append(item)

    @precondition(lambda self: self.filed)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        item = self.filed.pop(data.draw(st.integers(0, len(self.filed) - 1)))
        self.shelf.take(item)
        self.off.append(item)

    @rule(count=st.integers(1, 5), spared=st.sets(st.integers(1, 3)))
    def take_cheapest(self, count: int, spared: set[int]) -> None:
        taken = []
        source = self.shelf.ascending(lambda item: item.tenant in spared)
        for item in source:
            self.shelf.take(item)
            taken.append(item)
            if len(taken) == count:
                break
        source.close()
        order = sorted(self.filed, key=lambda item: (item.worth, self.filed.index(item)))
        assert taken == [item for item in order if item.tenant not in spared][:count]
        self.filed = [item for item in self.filed if item not in taken]
        self.off += taken

    @invariant()
    def sizes_add_up(self) -> None:
        assert self.shelf.size == sum(item.size for item in self.filed)
        sizes = dict(self.shelf.sizes())
        assert sizes == {t: sum(i.size for i in self.filed if i.tenant == t) for t in {i.tenant for i in self.filed}}


TestShelfMachine = ShelfMachine.TestCase

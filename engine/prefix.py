"""Keys and values of earlier prompts, kept page by page for whoever begins with the same tokens.

A tree for each (adapter, tenant, salt): a node is a full page, found below its predecessor by its tokens. Tokens are
compared, not hashed to a name, so a hit is never somebody else's text; a tenant, a version or a salt that differs is
another tree. Pages that requests read are pinned; the rest idle in the pool beside its idle adapters
(engine/eviction.py), and leave from a tree's tips inwards.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stencilpress.engine.eviction import Item, Room
from stencilpress.engine.plan import Page
from stencilpress.engine.pool import Common, Pool

FRESH_COST = 0.5
"""What a page is worth that nobody has come back for, beside an adapter's page that is in host memory too: most
prompts never return."""
PROVEN_COST = 4.0
"""The same of a page that somebody has come back for: computing it takes longer than a copy."""


class Space(NamedTuple):
    """Within which prefixes are shared. An empty salt keys nothing: such requests share with nobody."""

    adapter: str
    tenant: int
    salt: bytes


class _Node(Item):
    """A full page of a tree. ``readers`` are requests that read it, ``hits`` all that came back for it."""

    __slots__ = ("_cache", "children", "hits", "key", "last_read", "page", "parent", "readers")

    def __init__(self, cache: PrefixCache, tenant: int, parent: _Node | None, key: bytes, page: Page) -> None:
        super().__init__(tenant, size=1)
        self.parent = parent
        self.key = key
        self.page = page
        self.readers = 0
        self.hits = 0
        self.last_read = 0
        self.children: dict[bytes, _Node] = {}
        self._cache = cache

    def evict(self) -> None:
        self._cache.drop(self)


class _Root(_Node):
    """Where a tree begins. Of one that is ``gone`` nothing is kept when its last readers leave."""

    __slots__ = ("gone", "space")

    def __init__(self, cache: PrefixCache, space: Space) -> None:
        super().__init__(cache, space.tenant, None, b"", -1)
        self.space = space
        self.gone = False


class Chain:
    """The common pages that one request reads, from its first token on. ``nodes[0]`` is the root."""

    __slots__ = ("nodes", "root")

    def __init__(self, root: _Root, nodes: list[_Node]) -> None:
        self.root = root
        self.nodes = nodes

    def __len__(self) -> int:
        return len(self.nodes) - 1

    @property
    def pages(self) -> tuple[Page, ...]:
        return tuple(node.page for node in self.nodes[1:])

    @property
    def found(self) -> bool:
        """Whether others find these pages: their tree is not gone, and they are not condemned."""
        first = self.nodes[1] if len(self) else None
        return not self.root.gone and (first is None or self.root.children.get(first.key) is first)


class PrefixCache:
    """Common pages of the pool: those that idle in the room, and those that requests read.

    ``enabled`` False keeps nothing.
    """

    def __init__(self, pool: Pool, room: Room, page_tokens: int, *, enabled: bool = True) -> None:
        self.hit_tokens = 0
        self._pool = pool
        self._room = room
        self._page_tokens = page_tokens
        self._enabled = enabled
        self._trees: dict[Space, _Root] = {}
        self._pages: set[Page] = set()

    def open(self, space: Space, tokens: Sequence[int]) -> Chain | None:
        """Pin the pages of the longest known beginning of ``tokens``, short of the last one, whose logits are needed.

        Every chain is closed once. None where nothing is shared.
        """
        if not self._enabled or not space.salt:
            return None
        root = self._trees.get(space)
        if root is None:
            root = self._trees[space] = _Root(self, space)
        node: _Node = root
        nodes = [node]
        for key in _keys(tokens, self._page_tokens):
            found = node.children.get(key)
            if found is None:
                break
            node = found
            nodes.append(node)
        for node in nodes:
            self._pin(node)
        return Chain(root, nodes)

    def use(self, chain: Chain, *, again: bool = False) -> int:
        """The request that opened the chain runs: count the hits. Returns the tokens that need no computing.

        ``again``: it was preempted and finds, among others, what it has computed itself, which is nothing saved.
        """
        for node in chain.nodes[1:]:
            node.hits += 1
        tokens = len(chain) * self._page_tokens
        if not again:
            self.hit_tokens += tokens
        return tokens

    def add(self, chain: Chain, tokens: Sequence[int], page: Page) -> Page:
        """The request's next page is full and computed: make it common.

        Returns the page to read from now on. It is another, and ``page`` goes back, if one like it is known already.
        """
        parent = chain.nodes[-1]
        key = array("i", tokens).tobytes()
        node = parent.children.get(key)
        if node is None:
            self._pool.hand_over(page, Common.CACHED)
            self._pages.add(page)
            node = parent.children[key] = _Node(self, parent.tenant, parent, key, page)
        else:
            self._pool.release((page,))
        self._pin(node)
        chain.nodes.append(node)
        return node.page

    def close(self, chain: Chain) -> None:
        """The request has ended, or lost its seat. Its pages idle, the last one the first to go."""
        root, found = chain.root, chain.found
        for node in reversed(chain.nodes):
            node.readers -= 1
            if node.readers or node is root:
                continue
            if found:
                self._file(node)
            else:
                self._free(node, self._pool.begun)
        self._prune(root)
        chain.nodes.clear()

    def condemn(self, chain: Chain) -> None:
        """What these pages hold was computed wrong: nobody finds them, or what follows them, again. Those that nobody
        reads are free now, the others when their readers leave."""
        if len(chain) and chain.found:
            first = chain.nodes[1]
            del chain.root.children[first.key]
            self._drop_idle(_below(first))

    def drop(self, node: _Node) -> None:
        """Give an idle page back to the pool."""
        self._take(node)
        self._free(node, node.last_read)

    def forget(self, adapter: str) -> int:
        """An adapter is no more: free its idle pages now, the others when their readers leave. Returns these."""
        read = 0
        for root in [root for space, root in self._trees.items() if space.adapter == adapter]:
            root.gone = True
            del self._trees[root.space]
            read += self._drop_idle(_below(root))
        return read

    def adapters(self) -> Iterator[str]:
        """Those that have common pages, by space."""
        return (space.adapter for space in self._trees if space.adapter)

    @property
    def idle_pages(self) -> int:
        """Pages that no request reads now."""
        return self._room.cached.size

    def holdings(self) -> tuple[Common, tuple[Page, ...]]:
        """All common pages, for :meth:`Pool.check`."""
        return Common.CACHED, tuple(self._pages)

    def _pin(self, node: _Node) -> None:
        node.readers += 1
        if node.filed:
            self._take(node)

    def _file(self, node: _Node) -> None:
        node.last_read = self._pool.begun
        node.used_s = self._room.clock()
        node.worth = self._room.worth(PROVEN_COST, node.hits) if node.hits else self._room.worth(FRESH_COST, 0)
        self._room.charge(node.tenant, 1)
        self._room.cached.file(node)

    def _take(self, node: _Node) -> None:
        self._room.charge(node.tenant, -1)
        self._room.cached.take(node)

    def _drop_idle(self, nodes: list[_Node]) -> int:
        """Drop those that nobody reads. Returns how many are left."""
        idle = [node for node in nodes if node.filed]
        for node in idle:
            self.drop(node)
        return len(nodes) - len(idle)

    def _free(self, node: _Node, last_read: int) -> None:
        """Give a page back, which nobody finds from now on: not even who reads what comes before it."""
        self._pages.discard(node.page)
        self._pool.release((node.page,), last_read)
        parent = node.parent
        if parent is not None and parent.children.get(node.key) is node:
            del parent.children[node.key]
            self._prune(parent)

    def _prune(self, node: _Node) -> None:
        """Forget a tree that nobody reads and whose last page has gone."""
        if isinstance(node, _Root) and not (node.readers or node.children or node.gone):
            del self._trees[node.space]


def _below(root: _Node) -> list[_Node]:
    """All nodes of a tree but its root, each after its predecessor."""
    nodes = list(root.children.values())
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes


def _keys(tokens: Sequence[int], page_tokens: int) -> Iterator[bytes]:
    """The full pages of ``tokens``, short of the last token, each as its tokens."""
    packed = array("i", tokens).tobytes()
    width = 4 * page_tokens
    return (packed[start : start + width] for start in range(0, 4 * (len(tokens) - 1) - width + 1, width))

"""Host memory's books: which adapters' images are in it, and which one goes when another must come in."""

from __future__ import annotations

from collections.abc import Callable

from stencilpress.engine.eviction import Item, Room

READ_COST = 1.0
"""Of an image's bytes: it is read again."""
NO_LIMIT = 1 << 62
"""As many bytes are never reached, and none need be kept for the first read."""
SPARE_COST = 0.25
"""Of an image whose adapter is in the pool as well."""


class Image(Item):
    """An adapter's image of ``size`` bytes. ``drop`` is called when it is evicted."""

    __slots__ = ("_drop",)

    def __init__(self, tenant: int, size: int, drop: Callable[[], None]) -> None:
        super().__init__(tenant, size)
        self._drop = drop

    def evict(self) -> None:
        self._drop()


class HostMemory:
    """At most ``max_images`` images of at most ``max_bytes`` in all; a single one may be larger.

    A read is announced by :meth:`begin`, while nobody knows yet how large its image is: as much room is kept for it as
    the largest image so far took, and all of it for the first. Images that turn out larger may exceed ``max_bytes``
    while somebody needs them; :meth:`shrink` ends that.
    """

    def __init__(self, max_images: int, max_bytes: int, clock: Callable[[], float]) -> None:
        self.images = 0
        self.bytes = 0
        self.reading = 0
        self.room = Room(clock)
        self._max_images = max_images
        self._max_bytes = max_bytes
        self._largest = 0
        self._unknown = max_bytes if max_bytes < NO_LIMIT else 0

    @property
    def full(self) -> bool:
        """Whether there is no room for one more."""
        most = self.images + self.reading
        coming = self.bytes + (self.reading + 1) * (self._largest or self._unknown)
        return most >= self._max_images or (coming > self._max_bytes and most > 0)

    def barred(self, tenant: int) -> bool:
        """Whether a tenant over its share must make room for one image more out of its own: all that it holds becomes
        idle once it is in the pool."""
        return self.room.exceeds(tenant, self._largest)

    def reclaim(self, tenant: int) -> bool:
        """Evict the idle image of least worth that the tenant may take. False if there is none."""
        return self.room.reclaim((self.room.adapters,), 1, tenant, over=self.barred(tenant)) > 0

    def shrink(self) -> None:
        """Evict idle images until the rest keeps to its bytes, or is a single one."""
        while self.bytes > self._max_bytes and self.images > 1:
            if not self.room.reclaim((self.room.adapters,), 1, 0, over=False):
                return

    def begin(self) -> None:
        """A read is ordered."""
        self.reading += 1

    def end(self, image: Image | None) -> None:
        """A read has ended, with an image or without one."""
        self.reading -= 1
        if image is not None:
            self.images += 1
            self.bytes += image.size
            self._largest = max(self._largest, image.size)
            self.room.charge(image.tenant, image.size)

    def dropped(self, image: Image) -> None:
        """An image is gone."""
        self.images -= 1
        self.bytes -= image.size
        self.room.charge(image.tenant, -image.size)

    def idle(self, image: Image, *, in_pool: bool, uses: float, used_s: float) -> None:
        """Nobody needs an image now."""
        image.used_s = used_s
        image.worth = self.room.worth(SPARE_COST if in_pool else READ_COST, uses)
        self.room.adapters.file(image)

    def busy(self, image: Image) -> None:
        """Somebody needs an idle image."""
        self.room.adapters.take(image)

    def change_hands(self, image: Image, tenant: int) -> None:
        """A busy image is on another tenant's account from now on."""
        self.room.charge(image.tenant, -image.size)
        image.tenant = tenant
        self.room.charge(tenant, image.size)

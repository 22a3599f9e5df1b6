"""Static files under a path that holds the hash of them all, so that a browser may keep each for ever.

Scripts import each other by relative paths, which therefore name the same release.
"""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable

from aiohttp import web

ROOT = "/console/static"
_FOREVER = "public, max-age=31536000, immutable"
_TYPES = {
    ".css": "text/css",
    ".js": "text/javascript",
    ".md": "text/plain",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
}


class StaticFiles:
    """All files of a folder, held in memory: a path that is not one of them cannot name any other file."""

    def __init__(self, folder: Traversable) -> None:
        self._files = dict(sorted(_read(folder, "").items()))
        self.version = _version(self._files)

    def url(self, name: str) -> str:
        """Where a browser gets a file. Raises :class:`KeyError` for one that does not exist."""
        if name not in self._files:
            raise KeyError(f"no static file {name!r}")
        return f"{ROOT}/{self.version}/{name}"

    async def serve(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if request.match_info["version"] != self.version or name not in self._files:
            raise web.HTTPNotFound
        headers = {"Cache-Control": _FOREVER}
        return web.Response(body=self._files[name], content_type=_type(name), charset="utf-8", headers=headers)


def packaged() -> StaticFiles:
    """The files that come with the distribution."""
    return StaticFiles(files("stencilpress.web") / "static")


def _read(folder: Traversable, prefix: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for entry in folder.iterdir():
        name = prefix + entry.name
        found |= _read(entry, f"{name}/") if entry.is_dir() else {name: entry.read_bytes()}
    return found


def _version(contents: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in contents.items():
        digest.update(f"{name}\n{len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _type(name: str) -> str:
    suffix = "." + name.rpartition(".")[2]
    return _TYPES.get(suffix) or mimetypes.types_map.get(suffix, "application/octet-stream")

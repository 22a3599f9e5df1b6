"""``make screenshots``: every page of the console in both themes, and on a phone, into ``docs/images/console``.

``python -m tests.browser.screenshots [PAGE…]``. It takes a real server with the demo base, an installation that
``example.py`` makes up, and requests that run meanwhile.
"""

from __future__ import annotations

import asyncio
import io
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import openai

from bench.server import Server, serving
from stencilpress.gateway.catalog.session import Database
from tests.browser import example
from tests.browser.conftest import BROWSER, FLAGS, stencilpress
from tests.browser.pages import PAGES
from tests.demo_base import NAME, ROOT, demo_base_folder
from tests.integration.console_harness import PASSWORD

if TYPE_CHECKING:
    from playwright.async_api import Page

IMAGES = ROOT / "docs" / "images" / "console"
PERSON = "ada@example.com"
SIZES = {"": (1280, 800), "phone": (380, 780)}
UPLOADS = (
    ("acme", "contracts", "json"),
    ("acme", "support", "support"),
    ("bluebird-travel", "itineraries", "pirate"),
    ("bluebird-travel", "reviews", "terse"),
    ("corner-clinic", "triage", "support"),
    ("demo", "support", "terse"),
    ("demo", "terse", "support"),
)
"""Tenant, adapter, and the folder of the examples that stands for it."""
FOLLOWING = ("dashboard", "tenant-dashboard", "memory", "canary")
FIRST_SCREENS = ("dashboard", "canary")
"""Long pages, of which the README shows what one sees first."""
FOLLOW_MS, SETTLE_MS = 2500, 600
"""How long a page that follows, and any other, is given before it is taken."""
PROMPT = "Write two sentences about the sea."


async def main(wanted: list[str]) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        models = data / "v1" / "models"
        models.mkdir(parents=True)
        (models / NAME).symlink_to(demo_base_folder(), target_is_directory=True)
        with serving(data, max_model_len="1024", gateways="1", alert_every_s="5", pool_bytes=str(128 << 20)) as server:
            async with Database(f"sqlite:///{data / 'v1' / 'catalog.db'}") as db, asyncio.TaskGroup() as group:
                keys = await example.people(db)
                await asyncio.to_thread(upload, data)
                await example.traffic(db)
                traffic = group.create_task(ask_for_ever(server, keys))
                await shoot(server, wanted or list(PAGES))
                traffic.cancel()


def upload(data: Path) -> None:
    for tenant, name, example_name in UPLOADS:
        folder = ROOT / "examples" / "adapters" / example_name
        stencilpress("adapter", "add", str(folder), "--tenant", tenant, "--name", name, data=data)
    canary = ("--canary", "2", "--percent", "20")
    stencilpress("alias", "move", "terse@prod", "1", *canary, "--expect", "1", "--tenant", "demo", data=data)
    stencilpress("adapter", "pin", "support", "--tenant", "demo", data=data)
    for adapter, threshold in (("support", "60"), ("pirate", "55")):
        stencilpress(
            "alert", "set-rule", "first_token_slow", "--tenant", "demo", "--adapter", adapter, "--threshold", threshold,
            data=data,
        )  # fmt: skip


async def ask_for_ever(server: Server, keys: Mapping[str, str]) -> None:
    """A few requests at a time, so that there is something to see."""

    async def one(key: str, model: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as api:
            while True:
                try:
                    await api.chat.completions.create(
                        model=model, messages=[{"role": "user", "content": PROMPT}], max_tokens=200
                    )
                except openai.APIError:  # such as a spent quota
                    await asyncio.sleep(2)

    async with asyncio.TaskGroup() as group:
        for tenant, adapters in example.ADAPTERS.items():
            group.create_task(one(keys[tenant], adapters[0]))


async def shoot(server: Server, names: list[str]) -> None:
    from playwright.async_api import async_playwright

    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=BROWSER, args=list(FLAGS))
        for theme in ("light", "dark"):
            for size, (width, height) in SIZES.items():
                context = await browser.new_context(
                    base_url=server.url,
                    viewport={"width": width, "height": height},
                    color_scheme="dark" if theme == "dark" else "light",
                )
                page = await context.new_page()
                images = {name: IMAGES / f"{'-'.join(filter(None, (name, size, theme)))}.png" for name in names}
                await visit(page, images)
                await context.close()
        await browser.close()


async def visit(page: Page, images: dict[str, Path]) -> None:
    """First as nobody, then as an operator, who may see everything."""
    order = sorted(images, key=lambda name: PAGES[name][0] is not None)
    signed_in = False
    for name in order:
        role, path = PAGES[name]
        if role is not None and not signed_in:
            await sign_in(page)
            signed_in = True
        await page.goto(path)
        if name == "chat":
            await compare(page)
        await page.wait_for_timeout(FOLLOW_MS if name in FOLLOWING else SETTLE_MS)
        keep(images[name], await page.screenshot(full_page=name != "chat"))
        if name in FIRST_SCREENS:
            keep(images[name].with_stem(f"first-{images[name].stem}"), await page.screenshot())


async def sign_in(page: Page) -> None:
    await page.goto("/console/sign-in")
    await page.get_by_label("E-mail address").fill(PERSON)
    await page.get_by_label("Password").fill(PASSWORD)
    await page.get_by_role("button", name="Sign in").click()
    await page.wait_for_url("**/console/")


async def compare(page: Page) -> None:
    """Two adapters on one question."""
    await page.goto("/console/t/demo/chat?model=pirate&model=terse")
    await page.get_by_role("textbox", name="Message").fill("What is the sea?")
    await page.keyboard.press("Enter")
    await page.wait_for_timeout(6000)


def keep(image: Path, png: bytes) -> None:
    """With at most 256 colours: a third of the size, and nothing that an eye would miss."""
    from PIL import Image

    few = Image.open(io.BytesIO(png)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(image, "PNG", optimize=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))

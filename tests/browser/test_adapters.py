"""Adapters in a real browser: dropped, refused, resumed, promoted, tried as a canary and taken back.

The gateway and its intake are the real ones; the engine is the fake one, which the pages do not see.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from stencilpress.gateway.access import Role
from stencilpress.gateway.adapter_config import CONFIG_NAME
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME
from tests.fakes.engine import Options
from tests.integration.admin_client import AdminClient, admin_client
from tests.integration.console_harness import PASSWORD, make_user, running_console
from tests.integration.gateway_harness import EOS, VOCAB_SIZE, Gateway
from tests.integration.test_adapters_api import files
from tests.unit.adapters import FIRST_B, lora_tensors, safetensors_bytes, tiny_spec
from tests.unit.test_archive import zip_bytes

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page, Route

HOME = "/console/t/demo"
API = "/tenants/demo/adapters"
DROP = """([selector, files]) => {
  const transfer = new DataTransfer();
  for (const [name, text] of files) {
    transfer.items.add(new File([Uint8Array.from(atob(text), (one) => one.charCodeAt(0))], name));
  }
  const place = document.querySelector(selector);
  for (const type of ["dragenter", "dragover", "drop"]) {
    place.dispatchEvent(new DragEvent(type, { dataTransfer: transfer, bubbles: true, cancelable: true }));
  }
}"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def console(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    options = Options(vocab_size=VOCAB_SIZE, eos_ids=(EOS,), max_model_len=512)
    async with running_console(tmp_path_factory.mktemp("adapters"), options=options) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def api(console: Gateway) -> AdminClient:
    return await admin_client(console, "demo", Role.ADMIN)


@pytest_asyncio.fixture(loop_scope="session")
async def page(console: Gateway, chromium: Browser) -> AsyncIterator[Page]:
    """A signed-in admin, in whose pages no script may fail."""
    user = await make_user(console.services.db, Role.ADMIN)
    await console.services.changes.poll()
    failures: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        context = await chromium.new_context(base_url=console.url)
        stack.push_async_callback(context.close)
        context.set_default_timeout(20_000)
        made = await context.new_page()
        made.on("pageerror", lambda error: failures.append(str(error)))
        await made.goto("/console/sign-in")
        await made.get_by_label("E-mail address").fill(user.email)
        await made.get_by_label("Password").fill(PASSWORD)
        await made.get_by_role("button", name="Sign in").click()
        await made.wait_for_url(lambda url: "/sign-in" not in url)
        yield made
    assert failures == []


async def drop(page: Page, contents: dict[str, bytes]) -> None:
    """Let go of files over the page, as a person does."""
    texts = [[name, base64.b64encode(content).decode()] for name, content in contents.items()]
    await page.evaluate(DROP, [".drop", texts])


def payloads(contents: dict[str, bytes]) -> list[Any]:
    """The same as a choice of files."""
    return [{"name": name, "mimeType": "", "buffer": content} for name, content in contents.items()]


def button(page: Page, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


async def test_a_dropped_adapter_becomes_a_version(page: Page, api: AdminClient) -> None:
    await page.goto(f"{HOME}/upload")
    await drop(page, {**files(), "README.md": b"hello", "optimizer.pt": b"x"})
    await page.get_by_text("Not sent: README.md, optimizer.pt").wait_for()
    await button(page, "Upload").click()
    await page.get_by_text("is needed").wait_for()
    await page.get_by_label("Adapter", exact=True).fill("Bad Name")
    assert "Use 1 to 63 of" in await page.locator("#upload-name-error").inner_text()
    await page.get_by_label("Adapter", exact=True).fill("dropped")
    await button(page, "Upload").click()
    await page.get_by_role("heading", name="dropped@1 is ready").wait_for()
    assert "prod points at it" in await page.locator("#upload-result").inner_text()
    assert "q_proj · 2 layers · r 4" in await page.locator("#upload-result").inner_text()
    assert (await api("GET", f"{API}/dropped/aliases/prod"))["version"] == 1
    await page.get_by_role("link", name="Open the version").click()
    await page.get_by_role("heading", name="dropped@1").wait_for()


async def test_an_archive_names_its_adapter(page: Page, api: AdminClient) -> None:
    await page.goto(f"{HOME}/upload")
    await page.locator("#upload-pick").set_input_files(payloads({"Zipped One.zip": zip_bytes(files(seed=5))}))
    assert await page.get_by_label("Adapter", exact=True).input_value() == "zipped-one"
    await page.get_by_text("Options").click()
    await page.get_by_label("Point prod at it").select_option("no")
    await button(page, "Upload").click()
    await page.get_by_role("heading", name="zipped-one@1 is ready").wait_for()
    assert (await api("GET", f"{API}/zipped-one"))["aliases"] == []


async def test_findings_stand_beside_the_file_that_caused_them(page: Page, api: AdminClient) -> None:
    tensors = lora_tensors(tiny_spec(vocab_size=VOCAB_SIZE))
    tensors[FIRST_B][0, 0] = 3.4e38
    await page.goto(f"{HOME}/upload?adapter=refused")
    await drop(page, {**files(use_dora=True, bias="all"), WEIGHTS_NAME: safetensors_bytes(tensors)})
    await button(page, "Upload").click()
    await page.get_by_text("This adapter cannot be served: 3 findings.").wait_for()
    config, weights = page.locator(f'[data-part="{CONFIG_NAME}"]'), page.locator(f'[data-part="{WEIGHTS_NAME}"]')
    assert await config.locator(".upload-findings code").all_inner_texts() == ["use_dora", "bias"]
    assert await weights.locator(".upload-findings code").all_inner_texts() == [FIRST_B]
    assert (await api.raw("GET", f"{API}/refused"))[0] == 404
    await page.reload()
    assert await page.locator("#upload-unfinished").inner_text() == "", "nothing of it is left"


async def test_what_cannot_be_an_adapter_is_not_sent(page: Page) -> None:
    await page.goto(f"{HOME}/upload")
    for contents, text in (
        ({CONFIG_NAME: b"{}"}, f"{WEIGHTS_NAME} is missing"),
        ({"adapter_model.bin": b"x", CONFIG_NAME: b"{}"}, "saved as a pickle"),
        ({"a.zip": b"x", "b.zip": b"x"}, "one archive at a time"),
        ({CONFIG_NAME: b"", WEIGHTS_NAME: b"x"}, "The file is empty."),
        ({CONFIG_NAME: b" " * ((1 << 20) + 1), WEIGHTS_NAME: b"x"}, "at most 1 MiB are accepted"),
    ):
        await page.locator("#upload-pick").set_input_files(payloads(contents))
        await page.get_by_text(text).wait_for()
        assert await button(page, "Upload").is_disabled()


async def test_a_large_file_goes_in_parts_even_where_the_page_is_not_secure(page: Page) -> None:
    """Over plain HTTP browsers have no digests of their own. The server compares those of parts and of the whole."""
    sent: list[str] = []
    await page.add_init_script("Object.defineProperty(crypto, 'subtle', { value: undefined })")
    page.on("request", lambda request: sent.append(request.url) if WEIGHTS_NAME in request.url else None)
    await page.goto(f"{HOME}/upload?adapter=large")
    await page.locator("#upload-pick").set_input_files(payloads({**files(), WEIGHTS_NAME: b"large" * (4 << 20)}))
    await button(page, "Upload").click()
    weights = page.locator(f'[data-part="{WEIGHTS_NAME}"]')
    await weights.get_by_text("is no safetensors file").wait_for()
    offsets = [int(url.partition("offset=")[2].partition("&")[0]) for url in sent]
    assert offsets == [0, 8 << 20, 16 << 20]
    await button(page, "Start over").click()
    assert await page.locator(".drop").is_visible()
    assert await page.locator("#upload-files").inner_text() == ""


async def test_an_upload_goes_on_after_a_reload(page: Page, api: AdminClient) -> None:
    contents, held = files(seed=8), asyncio.Event()
    sent: list[str] = []

    async def hold(route: Route) -> None:
        held.set()  # it is never answered: the connection hangs

    await page.route(f"**/files/{WEIGHTS_NAME}*", hold)
    await page.goto(f"{HOME}/upload?adapter=resumed")
    await page.locator("#upload-pick").set_input_files(payloads(contents))
    await button(page, "Upload").click()
    await held.wait()
    await button(page, "Pause").click()
    await page.get_by_text("Paused").wait_for()
    await page.unroute_all(behavior="ignoreErrors")

    page.on("request", lambda request: sent.append(request.url) if "/files/" in request.url else None)
    await page.goto(f"{HOME}/upload")
    unfinished = page.locator("#upload-unfinished")
    await unfinished.get_by_text("The upload of resumed was interrupted").wait_for()
    async with page.expect_file_chooser() as choice:
        await unfinished.get_by_role("button", name="Choose the files").click()
    await (await choice.value).set_files(payloads({**contents, WEIGHTS_NAME: b"other"}))
    await page.get_by_text("These are not the files of the interrupted upload").wait_for()
    async with page.expect_file_chooser() as choice:
        await unfinished.get_by_role("button", name="Choose the files").click()
    await (await choice.value).set_files(payloads(contents))
    await page.get_by_role("heading", name="resumed@1 is ready").wait_for()
    assert [url.partition("/files/")[2].partition("?")[0] for url in sent] == [WEIGHTS_NAME], "the config was there"
    await page.reload()
    assert await unfinished.inner_text() == ""


async def test_a_lost_connection_is_tried_again(page: Page) -> None:
    failures = [b"lost", b"lost"]

    async def fail_twice(route: Route) -> None:
        if failures:
            failures.pop()
            await route.abort("connectionreset")
        else:
            await route.continue_()

    await page.route(f"**/files/{WEIGHTS_NAME}*", fail_twice)
    await page.goto(f"{HOME}/upload?adapter=stubborn")
    await page.locator("#upload-pick").set_input_files(payloads(files(seed=9)))
    await button(page, "Upload").click()
    await page.get_by_role("heading", name="stubborn@1 is ready").wait_for()
    assert failures == []


async def test_a_cancelled_upload_leaves_nothing(page: Page, console: Gateway) -> None:
    held = asyncio.Event()

    async def hold(route: Route) -> None:
        held.set()

    await page.route(f"**/files/{WEIGHTS_NAME}*", hold)
    await page.goto(f"{HOME}/upload?adapter=cancelled")
    await page.locator("#upload-pick").set_input_files(payloads(files(seed=10)))
    await button(page, "Upload").click()
    await held.wait()
    async with page.expect_response(lambda answer: answer.request.method == "DELETE") as deleted:
        await button(page, "Cancel").click()
    assert (await deleted.value).status == 204
    await page.unroute_all(behavior="ignoreErrors")
    await page.wait_for_load_state()
    assert await page.locator("#upload-unfinished").inner_text() == ""


async def test_promote_canary_and_back(page: Page, api: AdminClient) -> None:
    at = f"{HOME}/adapters/pirate"
    await page.goto(f"{at}/aliases?version=2")
    dialog = page.get_by_role("dialog", name="Promote to prod")
    await dialog.get_by_label("Reason").fill("better verses")
    await dialog.get_by_role("button", name="Promote").click()
    await page.get_by_text("pirate@prod is version 2 now.").wait_for()
    await page.get_by_role("button", name="Roll back to @1").click()
    await page.get_by_text("prod points at @1 again.").wait_for()

    await page.get_by_role("link", name="Canary…").click()
    await page.get_by_role("button", name="25 %").click()
    slider = page.get_by_label("Share of the users")
    assert await slider.input_value() == "25"
    await slider.press("ArrowRight")
    assert await page.locator("output").inner_text() == "26 %"
    await page.get_by_label("Errors above, %").fill("2")
    await page.get_by_role("button", name="Start the canary").click()
    await page.get_by_text("26 % of the users of prod get @2 now.").wait_for()
    canary = (await api("GET", f"{API}/pirate/aliases/prod"))["canary"]
    assert (canary["version"], canary["percent"], canary["guard"]["max_error_share"]) == (2, 26, 0.02)
    await page.get_by_text("too early to say").wait_for()
    async with page.expect_response(lambda answer: "/canary/figures" in answer.url):
        await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.on("dialog", lambda asked: asked.accept())
    await page.get_by_role("button", name="Promote @2").click()
    await page.get_by_text("pirate@prod is version 2 for everybody now.").wait_for()


async def test_smoke_prompts_are_added_and_taken_away(page: Page, api: AdminClient) -> None:
    await page.goto(f"{HOME}/adapters/pirate/smoke")
    first = page.get_by_role("group", name="Prompt 1")
    await first.get_by_label("Message", exact=True).fill("one")
    await first.get_by_role("button", name="Message", exact=True).click()
    await first.get_by_label("Role").nth(1).select_option("assistant")
    await first.get_by_label("Message", exact=True).nth(1).fill("two")
    await button(page, "Prompt").click()
    second = page.get_by_role("group", name="Prompt 2")
    await second.get_by_label("Message", exact=True).fill("three")
    await second.get_by_label("Answer must match").fill("x|y")
    await button(page, "Prompt").click()
    await page.get_by_role("group", name="Prompt 3").get_by_role("button", name="Remove", exact=True).click()
    await button(page, "Save").click()
    await page.get_by_text("Smoke prompts are saved.").wait_for()
    prompts = (await api("GET", f"{API}/pirate/smoke-prompts"))["prompts"]
    assert [[one["content"] for one in prompt["messages"]] for prompt in prompts] == [["one", "two"], ["three"]]
    assert prompts[0]["messages"][1]["role"] == "assistant"
    assert prompts[1]["must_match"] == "x|y"
    await api("PUT", f"{API}/pirate/smoke-prompts", {"prompts": []})

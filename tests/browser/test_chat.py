"""Chatting as a person does: over a real server for what streams, over a fake engine for what must be foretold.

The fake engine echoes the prompt, so an answer's text is what the test writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from stencilpress.gateway.access import Role
from stencilpress.gateway.catalog.tenants import change_tenant
from tests.browser.conftest import Site, Visit
from tests.fakes.engine import Options
from tests.integration.console_harness import PASSWORD, make_user, running_console
from tests.integration.gateway_harness import EOS, VOCAB_SIZE, Gateway

if TYPE_CHECKING:
    from playwright.async_api import Browser, Locator, Page

CHAT = "/console/t/demo/chat"
PACED = Options(vocab_size=VOCAB_SIZE, eos_ids=(EOS,), max_model_len=4000, step_delay_s=0.01)
HOSTILE = (
    "<img src=x onerror=window.owned=1>",
    "<script>window.owned=1</script>",
    "<svg/onload=window.owned=1>",
    "<iframe srcdoc='<script>parent.owned=1</script>'></iframe>",
    "<a href=javascript:window.owned=1>raw</a>",
    "[js](javascript:window.owned=1)",
    "[tab](java\tscript:window.owned=1)",
    "[data](data:text/html,<script>opener.owned=1</script>)",
    "[vb](vbscript:window.owned=1)",
    "[rel](/console/sign-out)",
    "![pixel](https://elsewhere.example/pixel.png)",
    "![x](x onerror=window.owned=1)",
    '[quote](https://a.example/" onmouseover="window.owned=1)',
    "<https://b.example/>",
    "<style>body{display:none}</style>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=window.owned=1&gt;'>",
    '```"><img/src=x/onerror=window.owned=1>\ncode\n```',
    "[ref]: javascript:window.owned=1\n\n[ref]",
    "<form action=/console/sign-out><button name=body>x</button></form>",
    "<base href=https://elsewhere.example/>",
)


DOCUMENTS = (
    "# a\n\ntext\nmore\n\n- one\n- two\n  - nested\n\n  para in two\n\n- three\n\nend",
    "1. a\n\n2. b\n\n3. c\n\nfoo\n\n```js\nlet x;\n\n\ny\n```\nafter",
    "| a | b |\n|--|--:|\n| 1 | 2 |\n| 3 | 4 |\n\nx\n\n> q\n> w\n\n> e\n\nSetext\n===\n\npara\n---\n\n***\n",
    "[x]: http://a.example\n\nsee [x] and [y]\n\n[y]: http://b.example",
    "```\nopen\nfence\n  indented <b>",
    "    indented\n    code\n\n    more\n\na\r\nb\r\n\r\n- c\r\n- d\r\n\r\nq",
    "<div>\nraw\n\nmore</div>\n\n<br>\n\nx\n\n```py\na\n```\n```py\nb\n```\n\n~~~md\n```\nx\n```\n~~~",
    "* a\n\n  b\n\n\n* c\n* d\n\n1. x\n1. y\n\n- [ ] todo\n- [x] done\n\n- a\n-\n- b\n\n10. x\n11. y\n\ntext\n1. not",
    "**bold\n\nunclosed** *x ![i](http://e.example/i.png) <http://c.example> www.e.example",
)
GROWN = """async ([documents, sizes]) => {
  const main = [...document.scripts].find(({ src }) => src.endsWith("chat/main.js")).src;
  const { markdown, GrowingMarkdown } = await import(main.replace("main.js", "markdown.js"));
  const wrong = [];
  for (const text of documents) {
    const whole = document.createElement("div");
    whole.append(markdown(text));
    for (const size of sizes) {
      const element = document.createElement("div");
      const grown = new GrowingMarkdown(element);
      for (let at = size; at < text.length; at += size) grown.update(text.slice(0, at));
      grown.finish(text);
      if (element.innerHTML !== whole.innerHTML) wrong.push([text, size, element.innerHTML, whole.innerHTML]);
    }
  }
  return wrong;
}"""


@dataclass
class Frames:
    """What the page's WebSocket has received."""

    events: list[dict[str, Any]] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        page.on("websocket", lambda socket: socket.on("framereceived", self._received))

    def _received(self, payload: str | bytes) -> None:
        self.events.append(json.loads(payload))

    def deltas(self) -> list[str]:
        """The response of each delta, in order."""
        return [event["response_id"] for event in self.events if event["type"] == "response.output_text.delta"]


@dataclass
class Desk:
    """A console over the fake engine, and one signed-in browser."""

    gateway: Gateway
    page: Page

    async def ask(self, text: str, **settings: str) -> None:
        await ask(self.page, text, **settings)

    def answers(self, status: str) -> Locator:
        return self.page.locator(f".answer[data-status={status}]")


async def ask(page: Page, text: str, **settings: str) -> None:
    if settings:
        panel = page.locator("#chat-settings")
        if not await panel.is_visible():
            await page.get_by_role("button", name="Settings").click()
        for name, value in settings.items():
            await panel.locator(f"[name={name}]").fill(value)
    await page.get_by_label("Your message").fill(text)
    await page.get_by_label("Your message").press("Enter")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def console(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with running_console(tmp_path_factory.mktemp("chat"), options=PACED) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="session")
async def desk(console: Gateway, chromium: Browser) -> AsyncIterator[Desk]:
    console.engine.options = PACED
    console.engine.submits.clear()
    console.engine.aborts.clear()
    user = await make_user(console.services.db, Role.ADMIN)
    async with contextlib.AsyncExitStack() as stack:
        context = await chromium.new_context(base_url=console.url)
        stack.push_async_callback(context.close)
        context.set_default_timeout(20_000)
        page = await context.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        await page.goto(f"/console/sign-in?next={CHAT}")
        await page.get_by_label("E-mail address").fill(user.email)
        await page.get_by_label("Password").fill(PASSWORD)
        await page.get_by_role("button", name="Sign in").click()
        await page.wait_for_url(lambda url: CHAT in url)
        yield Desk(console, page)
        assert errors == []


async def test_an_adapter_streams_and_its_figures_are_told(visit: Visit, site: Site) -> None:
    name = site.adapters[0]
    page = await visit(Role.ADMIN, f"{CHAT}?model={name}")
    frames = Frames()
    frames.watch(page)
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await page.reload()
    await ask(page, "Say something.", max_tokens="24", temperature="0")
    done = page.locator(".answer[data-status=done]")
    await done.wait_for()
    assert await done.locator("[data-model]").text_content() == f"{name}@1"
    figures = await done.locator("[data-figures]").text_content()
    assert figures is not None
    assert "first token" in figures
    assert "tok/s" in figures
    text = "".join(event["delta"] for event in frames.events if event["type"] == "response.output_text.delta")
    await done.get_by_role("button", name="Copy the answer").click()
    assert await page.evaluate("() => navigator.clipboard.readText()") == text


async def test_two_models_answer_at_the_same_time(visit: Visit, site: Site) -> None:
    first, second = site.adapters[:2]
    page = await visit(Role.ADMIN, f"{CHAT}?model={first}")
    frames = Frames()
    frames.watch(page)
    await page.reload()
    await page.get_by_role("button", name="Compare").click()
    model = page.get_by_role("combobox", name="Model").nth(1)
    await model.fill(second)
    await page.get_by_role("option", name=second, exact=False).first.click()
    await ask(page, "Tell me a long story about the sea.", max_tokens="96", temperature="0")
    await page.locator(".answer[data-status=done]").nth(1).wait_for()
    models = await page.locator(".answer [data-model]").all_text_contents()
    assert models == [f"{first}@1", f"{second}@1"]
    order = frames.deltas()
    assert len(set(order)) == 2
    assert order != sorted(order, key=order.index)  # they took turns
    assert page.url.split("?")[1].startswith(f"model={first}&model={second}#")


async def test_a_viewer_has_no_composer(visit: Visit) -> None:
    page = await visit(Role.VIEWER, CHAT)
    assert await page.get_by_text("Your role is viewer").is_visible()
    assert await page.locator("#chat-input").count() == 0


async def test_stopping_keeps_what_has_come(desk: Desk) -> None:
    await desk.ask("abc", max_tokens="3500")
    await desk.page.locator(".answer[data-status=streaming] .prose", has_text="abcabc").wait_for()
    await desk.page.keyboard.press("Escape")
    await desk.answers("stopped").wait_for()
    text = await desk.page.locator(".prose").text_content()
    assert text is not None
    assert text.startswith("abcabc")
    assert desk.gateway.engine.aborts
    assert await desk.page.get_by_role("button", name="Send", exact=True).is_visible()


async def test_the_page_follows_an_answer_only_while_the_reader_is_at_its_end(desk: Desk) -> None:
    page, scroller = desk.page, desk.page.locator("[data-scroll]")
    beyond_end = "(e) => e.scrollHeight - e.clientHeight - e.scrollTop"
    await desk.ask("line\n\n" * 3 + "end ", max_tokens="3500")
    await page.locator(".prose p").nth(40).wait_for()
    assert await scroller.evaluate(beyond_end) < 5
    await scroller.hover()
    await page.mouse.wheel(0, -400)
    await page.get_by_role("button", name="To the end").wait_for()
    top = await scroller.evaluate("(e) => e.scrollTop")
    seen = await page.locator(".prose p").count()
    await page.locator(".prose p").nth(seen + 20).wait_for(state="attached")
    assert await scroller.evaluate("(e) => e.scrollTop") == top
    await page.get_by_role("button", name="To the end").click()
    await page.locator(".prose p").nth(seen + 30).wait_for()
    assert await scroller.evaluate(beyond_end) < 5
    await page.get_by_role("button", name="Stop").click()
    await desk.answers("stopped").wait_for()


async def test_a_reload_keeps_the_conversation_and_another_can_follow(desk: Desk) -> None:
    await desk.ask("one", max_tokens="6")
    await desk.answers("done").wait_for()
    await desk.page.reload()
    await desk.answers("done").wait_for()
    assert await desk.page.locator(".said").all_text_contents() == ["one"]
    assert await desk.page.locator(".prose").inner_text() == "oneone"
    await desk.page.get_by_role("button", name="New conversation").click()
    await desk.page.get_by_role("heading", name="Ask base").wait_for()
    await desk.ask("two", max_tokens="3")
    await desk.answers("done").wait_for()
    await desk.page.get_by_role("link", name="one").click()
    await desk.page.locator(".said", has_text="one").wait_for()
    assert await desk.page.locator(".chat-conversations li").count() == 2


async def test_a_reload_in_the_middle_keeps_the_text_so_far(desk: Desk) -> None:
    await desk.ask("xyz", max_tokens="3500")
    await desk.page.locator(".answer[data-status=streaming] .prose", has_text="xyzxyz").wait_for()
    await desk.page.reload()
    await desk.answers("cut").wait_for()
    text = await desk.page.locator(".prose").text_content()
    assert text is not None
    assert text.startswith("xyzxyz")


async def test_what_was_said_can_be_changed_and_asked_again(desk: Desk) -> None:
    await desk.ask("wrong", max_tokens="5")
    await desk.answers("done").wait_for()
    await desk.page.get_by_label("Your message").press("ArrowUp")
    edit = desk.page.get_by_label("Edit the message")
    assert await edit.input_value() == "wrong"
    await edit.fill("right")
    await edit.press("Enter")
    await desk.page.locator(".answer[data-status=done] .prose", has_text="right").wait_for()
    assert await desk.page.locator(".said").all_text_contents() == ["right"]
    submits = len(desk.gateway.engine.submits)
    await desk.page.get_by_role("button", name="Answer again").click()
    await desk.answers("done").wait_for()
    assert len(desk.gateway.engine.submits) == submits + 1


async def test_a_lost_connection_is_told_and_made_anew(desk: Desk) -> None:
    await desk.ask("abc", max_tokens="3500")
    await desk.page.locator(".answer[data-status=streaming] .prose", has_text="abcabc").wait_for()
    for socket in list(desk.gateway.services.websockets):
        await socket.close(code=1001)
    await desk.answers("cut").wait_for()
    assert await desk.page.get_by_text("The connection was lost in the middle.").is_visible()
    await ask(desk.page, "still there", max_tokens="11")
    await desk.page.locator(".answer[data-status=done] .prose").wait_for()
    await desk.page.locator(".chat-state:empty").wait_for(state="attached")


async def test_a_killed_gateway_is_back_and_the_answer_can_be_asked_again(visit: Visit, site: Site) -> None:
    page = await visit(Role.ADMIN, f"{CHAT}?model={site.adapters[0]}")
    await ask(page, "Tell me a very long story.", max_tokens="800", temperature="0")
    await page.locator(".answer[data-status=streaming]").wait_for()
    for child in site.server.supervisor.children(recursive=True):
        if "stencilpress.gateway" in " ".join(child.cmdline()):
            child.kill()
    await page.locator(".answer[data-status=cut]").wait_for()
    await ask(page, "And now?", max_tokens="8")
    await page.locator(".answer[data-status=done]").wait_for()


async def test_a_refusal_names_the_limit_and_when_there_is_room(desk: Desk) -> None:
    db = desk.gateway.services.db
    await change_tenant(db, "demo", {"requests_per_minute": 1})
    await desk.gateway.services.changes.poll()
    await desk.ask("a", max_tokens="2")
    await desk.answers("done").wait_for()
    await desk.ask("b", max_tokens="2")
    refused = desk.answers("failed")
    await refused.wait_for()
    text = await refused.locator("[data-error-text]").text_content()
    assert text is not None
    assert "no more requests in a minute" in text
    assert "There is room again in" in text
    await change_tenant(db, "demo", {"requests_per_minute": None})
    await desk.gateway.services.changes.poll()
    await refused.get_by_role("button", name="Try again").click()
    await desk.answers("done").nth(1).wait_for()


async def test_what_no_longer_fits_the_context_can_be_left_out(desk: Desk) -> None:
    for number, sign in enumerate("abc"):
        await desk.ask(f"{sign}-" * 700, max_tokens="2")
        await desk.page.locator(".answer:is([data-status=done], [data-status=failed])").nth(number).wait_for()
    await desk.answers("failed").get_by_text("does not fit the model's context").wait_for()
    await desk.page.get_by_role("button", name="Leave out the earlier half").click()
    await desk.answers("done").nth(2).wait_for()
    assert await desk.page.locator(".turn.since .said").all_text_contents() == ["c-" * 700]
    assert await desk.page.locator(".turn").count() == 3


async def test_columns_come_and_go_and_each_has_its_own_history(desk: Desk) -> None:
    await desk.ask("ab", max_tokens="4")
    await desk.answers("done").wait_for()
    await desk.page.get_by_role("button", name="Compare").click()
    await desk.page.keyboard.type("pirate@2")
    await desk.page.keyboard.press("Enter")
    await desk.ask("cd")
    second = desk.page.locator(".chat-column").nth(1)
    await second.locator(".answer[data-status=done]").nth(1).wait_for()
    assert await second.locator("[data-model]").all_text_contents() == ["acme/Press-1B", "pirate@2"]
    await desk.page.get_by_role("button", name="Remove this column").first.click()
    assert await desk.page.locator("[data-model]").all_text_contents() == ["acme/Press-1B", "pirate@2"]
    await desk.page.reload()
    await desk.answers("done").nth(1).wait_for()
    assert await desk.page.locator(".chat-column").count() == 1
    assert await desk.page.get_by_role("combobox", name="Model").input_value() == "pirate@2"


async def test_conversations_are_renamed_exported_and_deleted(desk: Desk) -> None:
    page = desk.page
    await desk.ask("a [b](javascript:alert) c", max_tokens="12")
    await desk.answers("done").wait_for()
    for name, ending in (("Export as Markdown", ".md"), ("Export as JSON", ".json")):
        await page.get_by_label("More").click()
        async with page.expect_download() as coming:
            await page.get_by_role("button", name=name).click()
        kept = await coming.value
        assert kept.suggested_filename.endswith(ending)
        assert "a [b](javascript:alert) c" in await asyncio.to_thread((await kept.path()).read_text)
    await page.get_by_label("More").click()
    await page.get_by_role("button", name="Rename", exact=True).click()
    await page.get_by_role("textbox", name="Title", exact=True).fill("<img src=x onerror=window.owned=1>")
    await page.get_by_role("textbox", name="Title", exact=True).press("Enter")
    await page.get_by_role("heading", name="<img src=x").wait_for()
    assert await page.evaluate("() => window.owned") is None
    page.on("dialog", lambda dialog: dialog.accept())
    await page.get_by_role("button", name="Delete all").click()
    await page.locator(".turn").wait_for(state="detached")
    await page.reload()
    await page.get_by_role("heading", name="Ask base").wait_for()
    assert await page.locator(".chat-conversations li").count() == 0


async def test_settings_out_of_range_are_told_and_not_sent(desk: Desk) -> None:
    await desk.ask("a", temperature="2.5", seed="9223372036854775807", stop="\\n")
    field = desk.page.get_by_label("Temperature").nth(1)
    assert await field.get_attribute("aria-invalid") == "true"
    assert await desk.page.locator("#c-temperature-fault").text_content() == "At most 2."
    assert desk.gateway.engine.submits == []
    await desk.ask("a", temperature="0.5", max_tokens="2")
    await desk.answers("done").wait_for()
    [submit] = desk.gateway.engine.submits
    assert (submit.sampling.temperature, submit.sampling.seed) == (0.5, 9223372036854775807)


async def test_a_growing_text_looks_as_it_will_when_complete(desk: Desk) -> None:
    assert await desk.page.evaluate(GROWN, [DOCUMENTS, [1, 2, 3, 7, 50]]) == []


async def test_a_model_that_does_not_exist_is_told_so(desk: Desk) -> None:
    await desk.page.goto(f"{CHAT}?model=%3Cimg%20src%3Dx%20onerror%3Dwindow.owned%3D1%3E&model=pirate%401")
    await desk.ask("hello", max_tokens="5")
    await desk.answers("failed").get_by_text("There is no such model").wait_for()
    await desk.answers("done").wait_for()
    assert await desk.page.evaluate("() => window.owned") is None


async def test_hostile_answers_are_inert(desk: Desk) -> None:
    requested: list[str] = []
    desk.page.on("request", lambda request: requested.append(request.url))
    text = "\n\n".join(HOSTILE)
    desk.gateway.engine.options = replace(PACED, step_delay_s=0.002, tokens_per_step=8)
    tokens = len(desk.gateway.services.tokenizer.encode(text, special=False))
    await desk.ask(text, max_tokens=str(tokens))
    await desk.page.locator(".answer[data-status=streaming]").wait_for()
    await desk.answers("done").wait_for(timeout=60_000)
    await assert_inert(desk.page, requested)
    await desk.page.reload()
    await desk.answers("done").wait_for()
    await assert_inert(desk.page, requested)


async def assert_inert(page: Page, requested: list[str]) -> None:
    assert await page.evaluate("() => window.owned") is None
    assert not [url for url in requested if "elsewhere" in url]
    tags = await page.evaluate(
        "() => [...new Set([...document.querySelectorAll('.prose *')].filter((e) => !e.closest('.chat-code-head'))"
        ".map((e) => e.localName))]"
    )
    assert not {"img", "script", "svg", "iframe", "style", "form", "base", "math", "object"} & set(tags)
    attributes = await page.evaluate(
        "() => [...document.querySelectorAll('.prose *')].flatMap((e) => e.getAttributeNames())"
    )
    assert not [name for name in attributes if name.startswith("on") or name in ("style", "src", "id", "srcdoc")]
    links = await page.eval_on_selector_all(
        ".prose a[href]", "(all) => all.map((a) => [a.getAttribute('href'), a.rel, a.target])"
    )
    assert links
    for href, rel, target in links:
        assert href.startswith(("https://", "http://", "mailto:")), href
        assert "noopener" in rel
        assert target == "_blank"

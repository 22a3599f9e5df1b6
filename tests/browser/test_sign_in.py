"""Signing in as a person does."""

from __future__ import annotations

from stencilpress.gateway.access import Role
from tests.browser.conftest import FIRST_OPERATOR, Site, Visit
from tests.integration.console_harness import PASSWORD


async def test_the_first_operator_has_come_by_the_link_of_the_start(visit: Visit, site: Site) -> None:
    page = await visit(None, "/console/sign-in")
    await page.get_by_label("E-mail address").fill(FIRST_OPERATOR)
    await page.get_by_label("Password").fill(PASSWORD)
    await page.get_by_role("button", name="Sign in").click()
    await page.get_by_role("link", name="Tenants").wait_for()
    await page.goto(site.used_link)
    await page.get_by_role("heading", name="Not found").wait_for()


async def test_a_person_signs_in_and_out(visit: Visit) -> None:
    page = await visit(Role.OPERATOR, "/console/account")
    assert await page.get_by_role("heading", name="Account").is_visible()
    await page.get_by_role("button", name="Sign out").click()
    await page.wait_for_url("**/console/sign-in")
    await page.goto("/console/account")
    await page.wait_for_url("**/console/sign-in?next=%2Fconsole%2Faccount")


async def test_a_wrong_password_is_told(visit: Visit) -> None:
    page = await visit(None, "/console/")
    await page.get_by_label("E-mail address").fill("nobody@example.com")
    await page.get_by_label("Password").fill("not the password")
    await page.get_by_role("button", name="Sign in").click()
    alert = page.get_by_role("alert")
    await alert.wait_for()
    assert await alert.text_content() == "The e-mail address or the password is not right."


async def test_an_invited_person_chooses_a_password(visit: Visit, site: Site) -> None:
    admin = await visit(Role.ADMIN, "/console/t/demo/members")
    await admin.get_by_role("button", name="Invite").click()
    await admin.get_by_label("E-mail address").fill("invited@example.com")
    await admin.get_by_label("Role").select_option("viewer")
    await admin.get_by_role("button", name="Make the link").click()
    link = await admin.locator("[data-secret]").inner_text()
    person = await visit(None, link.removeprefix(site.url), width=360, theme="dark")
    await person.get_by_label("Password", exact=True).fill(PASSWORD)
    await person.get_by_label("The password again").fill(PASSWORD)
    await person.keyboard.press("Enter")
    await person.get_by_text("The password is set").wait_for()
    await person.get_by_label("E-mail address").fill("invited@example.com")
    await person.get_by_label("Password").fill(PASSWORD)
    await person.keyboard.press("Enter")
    await person.wait_for_url("**/console/t/demo/**")
    await admin.reload()
    row = admin.get_by_role("row", name="invited@example.com")
    await row.get_by_text("active").wait_for()

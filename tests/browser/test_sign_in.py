"""Signing in as a person does."""

from __future__ import annotations

from stencilpress.gateway.access import Role
from tests.browser.conftest import Visit


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

"""The page of the API's document works without any other server."""

from playwright.sync_api import expect

from tests.browser.pages import Visit


def test_swagger_ui_lists_the_routes(page: Visit) -> None:
    page.page.goto(f"{page.router_url}/docs")
    expect(page.page.get_by_text("/v1/chat/completions", exact=True).first).to_be_visible()


def test_the_root_shows_the_dashboard(page: Visit) -> None:
    page.page.goto(page.router_url)
    expect(page.page.locator("#live")).to_have_text("live")
    assert page.page.url.startswith(f"{page.router_url}/dashboard")

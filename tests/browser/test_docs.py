"""The pages of the API's document work without any other server."""

from playwright.sync_api import expect

from tests.browser.pages import Visit


def test_swagger_ui_lists_the_routes(page: Visit) -> None:
    page.page.goto(f"{page.router_url}/docs")
    expect(page.page.get_by_text("/v1/chat/completions", exact=True).first).to_be_visible()


def test_redoc_shows_the_document_and_asks_no_other_server(page: Visit) -> None:
    page.page.goto(f"{page.router_url}/redoc")
    expect(page.page.get_by_role("heading", level=1).first).to_contain_text("warmroute router")
    told = page.blame()  # among it remarks on schemas, and the refusal of a logo from elsewhere
    assert [each for each in told if each.startswith(("asked ", "raised "))] == []


def test_the_root_shows_the_dashboard(page: Visit) -> None:
    page.page.goto(page.router_url)
    expect(page.page.locator("#live")).to_have_text("live")
    assert page.page.url.startswith(f"{page.router_url}/dashboard")

"""The playground from the first letter to the answer, and prompts that would like to be more than text."""

import re

from playwright.sync_api import Page, expect

from tests.browser.pages import Visit, request_place
from tests.browser.world import World

HOSTILE = '<img src="x" onerror="document.title = \'owned\'"><script>document.title = "owned"</script>'
SYSTEM = "As a clerk you answer in one sentence, and never gives a number that was not asked for."


def write(page: Page, system: str, message: str) -> None:
    page.get_by_label("System prompt").fill(system)
    page.get_by_label("Message", exact=True).last.fill(message)


def send(page: Page) -> None:
    page.get_by_role("button", name="Send").click()


def fact(page: Page, name: str) -> str:
    value = page.locator("dl.facts dt", has_text=name).locator("xpath=following-sibling::dd[1]")
    expect(value).to_be_visible()
    return value.inner_text()


def test_prompt_is_written_sent_and_found_cached_the_second_time(page: Visit) -> None:
    page.open("/playground")
    write(page.page, SYSTEM, "How late is it?")
    expect(page.page.get_by_text(re.compile(r"^\d+ tokens in \d+ blocks of 16\.$"))).to_be_visible()
    expect(page.page.locator(".tokens .block").nth(2)).to_be_visible()
    assert page.page.locator(".tokens .block.warm").count() == 0
    expect(page.page.locator(".candidate")).to_have_count(3)
    send(page.page)
    # Of the first block, the template's own words may have been found.
    assert re.fullmatch(r"0 predicted, 1?\d reported", fact(page.page, "Cached tokens"))
    answered_by = fact(page.page, "Answered by")
    text = page.page.get_by_role("region", name="The answer").inner_text()
    assert len(text) > 10
    page.page.get_by_role("button", name="Go on from this answer").click()
    write(page.page, SYSTEM, "And how early?")
    expect(page.page.locator(".tokens .block.warm").nth(2)).to_be_visible()
    expect(page.page.locator(".candidate.winner")).to_contain_text(answered_by)
    page.page.keyboard.press("Control+Enter")
    expect(page.page.locator("dl.facts")).to_be_visible()
    found = re.fullmatch(r"([\d,]+) predicted, ([\d,]+) reported", fact(page.page, "Cached tokens"))
    assert found is not None and int(found[1]) > 100 and int(found[2]) >= int(found[1])
    assert fact(page.page, "Answered by") == answered_by
    assert re.fullmatch(r"\d.* m?s here, estimated .*s", fact(page.page, "Time to first token"))
    page.page.locator("dl.facts").get_by_role("link", name=re.compile("^req-")).click()
    expect(page.heading("Request")).to_be_visible()
    expect(page.page.locator(".candidate.winner")).to_contain_text(answered_by)


def test_answer_is_seen_while_it_streams_and_stopped(page: Visit, world: World) -> None:
    page.open("/playground")
    page.page.get_by_label("Longest answer").fill("3000")
    write(page.page, "", "Tell a long story. " * 4)
    send(page.page)
    answer = page.page.get_by_role("region", name="The answer")
    expect(answer).to_have_text(re.compile(r".{5,}", re.DOTALL))
    expect(answer).to_have_attribute("data-state", "streaming")
    page.page.get_by_role("button", name="Stop").click()
    expect(answer).to_have_attribute("data-state", "ended")
    expect(page.page.get_by_text("You stopped it")).to_be_visible()
    world.replicas[0].wait_idle()
    expect(page.page.get_by_role("button", name="Send")).to_be_enabled()


def test_error_is_shown_in_the_words_of_the_router(page: Visit) -> None:
    page.open("/playground")
    write(page.page, "", "much too long " * 1600)
    send(page.page)
    answer = page.page.locator("section").filter(has=page.page.get_by_role("heading", name="Answer"))
    expect(answer.get_by_role("alert")).to_contain_text(re.compile("22,?419 tokens; send at most 20,?479"))
    expect(page.page.get_by_role("button", name="Send")).to_be_enabled()
    assert all("Failed to load resource" in complaint for complaint in page.blame())


def test_hostile_prompt_stays_text_on_every_page(page: Visit) -> None:
    page.open("/playground")
    write(page.page, HOSTILE * 3, HOSTILE)
    expect(page.page.locator(".tokens")).to_contain_text("<img src=")
    for _ in range(2):  # what two prompts share is shown in the tree
        send(page.page)
        expect(page.page.locator("dl.facts")).to_be_visible()
    page.go("/tree")
    expect(page.page.get_by_role("rowheader", name=re.compile("<img src")).first).to_be_visible()
    page.go(request_place(HOSTILE))
    expect(page.page.get_by_role("alert").filter(has_text="<img")).to_be_visible()
    assert page.page.locator("main img[src='x']").count() == 0
    assert "owned" not in page.page.title()
    assert all("404" in complaint for complaint in page.blame())


def test_answer_shows_at_once_what_it_left_in_the_cache(page: Visit) -> None:
    page.open("/playground")
    write(page.page, "Nobody has begun like this. " * 12, "Have they?")
    expect(page.page.locator(".candidate.winner")).to_be_visible()
    assert page.page.locator(".tokens .block.warm").count() <= 1
    send(page.page)
    expect(page.page.locator(".tokens .block.warm").nth(10)).to_be_visible()
    cached = page.page.locator(".candidate.winner").get_by_text(re.compile(r"^\d+ cached$"))
    expect(cached).to_be_visible()
    assert int(cached.inner_text().removesuffix(" cached")) > 300


def test_clocks_tell_a_cold_question_about_a_long_guide_from_a_warm_one(page: Visit) -> None:
    page.open("/playground")
    page.page.get_by_label("Longest answer").fill("4")
    cold, warm = page.page.locator(".clock.cold"), page.page.locator(".clock.warm")
    few, most = r"s\d{1,2} of 1\d,\d{3} tokens cached$", r"s1\d,\d{3} of 1\d,\d{3} tokens cached$"
    for sample, clock, cached in (("Ask a long guide", cold, few), ("Ask it again", warm, most)):
        page.page.get_by_role("button", name=sample, exact=True).click()
        expect(page.page.locator(".tokens")).to_contain_text("LIGHTHOUSE")
        send(page.page)
        expect(page.page.locator(".answer")).to_have_attribute("data-state", "ended")
        expect(clock).to_contain_text(re.compile(cached))
    expect(page.page.locator(".clock[data-state=running]")).to_have_count(0)

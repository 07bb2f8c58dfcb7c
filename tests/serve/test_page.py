"""The page in a real browser: typed, translated, linked, and never more than text."""

import pytest

from rectiformer.translate.align import AVERAGE, align_pairs
from rectiformer.translate.options import SearchOptions

HOSTILE = "<img src=x onerror=alert(1)> 😀 Hund"


@pytest.fixture
def page(visit, server):
    opened = visit(server.address, offline=False)
    foreign = []
    opened.on(
        "request", lambda request: None if request.url.startswith(server.address) else foreign.append(request.url)
    )
    yield opened
    assert foreign == []


def test_a_text_is_translated_by_keys_alone_and_its_links_are_shown(page, translator):
    lines = ["Der Hund schläft.", "", HOSTILE]
    page.keyboard.type(lines[0])  # the field has the focus
    for line in lines[1:]:
        page.keyboard.press("Enter")
        page.keyboard.insert_text(line)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("li:nth-child(3)")
    expected = [found.text for found in translator.translate(lines, SearchOptions())]
    assert page.locator("bdi.source").all_text_contents() == lines
    assert page.locator("bdi.target").all_text_contents() == expected
    assert page.locator("li img").count() == 0

    (links,) = align_pairs(translator, [(lines[0], expected[0])], layer=0, head=AVERAGE)
    first = page.locator("li").first
    for word in range(first.locator(".source .word").count()):
        first.locator(".source .word").nth(word).hover()
        linked = first.locator(".target .word").evaluate_all(
            "words => words.flatMap((word, number) => word.classList.contains('linked') ? [number] : [])"
        )
        assert linked == sorted(target for source, target in links if source == word)
    page.mouse.move(0, 0)
    first.locator(".source .word").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.textContent") == "Hund"
    assert first.locator(".source .linked").all_text_contents() == ["Hund"]
    words = page.locator("li").last.locator(".source .word").all_text_contents()
    assert words[-2:] == ["😀", "Hund"]  # behind a character of two UTF-16 units
    assert page.get_by_role("status").inner_text() == "3 sentences translated"
    page.set_viewport_size({"width": 390, "height": 844})
    page.locator("textarea").fill("Donaudampfschifffahrt" * 5)
    page.keyboard.press("Control+Enter")
    page.get_by_text("1 sentence translated").wait_for()
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390


@pytest.mark.parametrize(
    ("codes", "header", "label"),
    [
        (("de", "en"), "German → English", "German text, one sentence per line"),
        (("pt_BR", ""), "Brazilian Portuguese → ?", "Brazilian Portuguese text, one sentence per line"),
        (("", "x-9"), "? → x-9", "Text, one sentence per line"),  # no code, but it does no harm
        (("", ""), "", "Text, one sentence per line"),
    ],
    ids=str,
)
def test_the_languages_are_named_as_far_as_they_are_known(browser, server, codes, header, label):
    model = server.ask("GET", "/v1/model").content | dict(
        zip(("source_language", "target_language"), codes, strict=True)
    )
    page = browser.new_page()
    page.route("**/v1/model", lambda route: route.fulfill(json=model))
    page.goto(server.address)
    page.wait_for_selector("body[data-ready]")
    assert page.locator("#languages").inner_text() == header
    assert page.locator("label").inner_text() == label
    assert page.locator("textarea").get_attribute("lang") == codes[0].replace("_", "-")
    page.close()


def test_a_refusal_is_shown_and_the_next_text_translated(browser, server):
    page = browser.new_page()  # whose console may say that the server refused
    page.goto(server.address)
    page.locator("textarea").fill("a\n" * 41)
    page.get_by_role("button", name="Translate").click()
    # Not by `wait_for_function`: it evaluates text again and again, which the page's policy forbids.
    page.locator("[role=alert]:not(:empty)").wait_for()
    assert page.locator("[role=alert]").inner_text() == "sentences: 41, but at most 40 are allowed"
    page.locator("textarea").fill("Hund")
    page.get_by_role("button", name="Translate").click()
    page.wait_for_selector("li")
    assert page.locator("[role=alert]").inner_text() == ""
    page.close()


def test_the_page_follows_the_colors_of_the_system(visit, server):
    colors = []
    for scheme in ("light", "dark"):
        page = visit(server.address, offline=False, color_scheme=scheme)
        colors.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colors == ["rgb(247, 247, 245)", "rgb(18, 21, 25)"]

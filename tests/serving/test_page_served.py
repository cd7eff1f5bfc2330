"""The page in Chromium before `didi serve` with the shipped models."""

import time

import pytest

import didi_instruct as didi

pytest.importorskip("fastapi", reason="serving needs its extra")

from tests.serving.servers import Parts, listening

PROMPT = "Once upon a time, there was a little dragon who"


@pytest.fixture(scope="module")
def models():
    return {name: didi.load(name, device="cpu") for name in ("stories", "stories/teacher")}


@pytest.fixture(scope="module")
def served(models):
    """The server's parts and its address."""
    parts = Parts(models)
    with listening(parts.app) as (address, _):
        yield parts, address
    parts.close()


def texts(here):
    return here.page.locator(".canvas").all_text_contents()


@pytest.mark.slow
def test_the_page_shows_what_generate_writes_and_so_does_its_link(models, served, visit):
    _, address = served
    here = visit(address)
    here.ready()
    assert here.page.locator("#steps").input_value() == "8"
    here.slide("#many", 12)
    here.slide("#samples", 2)
    here.page.fill("#seed", "3")
    here.race()
    assert here.troubles() == []
    lanes = [("stories", 8), ("stories/teacher", 8), ("stories/teacher", 12)]
    expected = [
        text
        for name, steps in lanes
        for text in models[name].generate(num=2, steps=steps, prompt=PROMPT, seed=3)
    ]
    assert [text.strip() for text in texts(here)] == [text.strip() for text in expected]
    for lane in range(3):
        numbers = here.page.locator(".lane").nth(lane).locator("dd").all_inner_texts()
        assert all(float(number.replace(",", "")) > 0 for number in numbers), numbers
    there = visit(here.page.url)
    there.status("All done.")
    assert texts(there) == texts(here)


def test_selected_words_are_rewritten_as_generate_does(models, served, visit):
    _, address = served
    here = visit(address)
    here.ready()
    here.page.uncheck("text=Teacher, many steps")
    here.page.check("text=Rewrite part of a text")
    here.page.fill("#text", "Tom had a very red ball. He was glad.")
    here.page.locator("#text").evaluate("e => { e.focus(); e.setSelectionRange(10, 18); }")
    here.page.locator("#selected mark", has_text="very red").wait_for()
    here.race()
    for text, name in zip(texts(here), ("stories", "stories/teacher"), strict=True):
        gap = len(models[name].tokenizer.encode([" very red"])[0])
        expected = models[name].generate(
            infill="Tom had a ___ ball. He was glad.", gap=str(gap), steps=8, seed=0
        )
        assert text == expected[0]


def test_a_server_hears_that_the_reader_stopped(served, visit):
    parts, address = served
    here = visit(address)
    here.ready()
    here.slide("#many", 256)
    here.page.click("#run")
    here.page.locator(".lane .fresh").first.wait_for()
    here.page.click("#stop-here")
    here.status("Stopped.")
    patience = time.monotonic() + 30
    while parts.engine.waiting and time.monotonic() < patience:
        time.sleep(0.05)
    assert parts.engine.waiting == 0
    assert here.page.locator(".lane").last.locator(".trouble").inner_text().startswith("Stopped")


def test_a_refused_setting_is_said(served, visit):
    _, address = served
    here = visit(address)
    here.ready()
    here.page.fill("#prompt", "word " * 300)
    here.race()
    assert len(here.troubles()) == 3
    assert all("Change it and press Write." in trouble for trouble in here.troubles())
    here.faults.clear()

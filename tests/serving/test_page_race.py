"""The page in Chromium: races, infilling, replay, links, stopping."""

import time

import pytest
from tests.serving.browser import PHONE
from tests.serving.stub_server import END, PROTEIN_MODELS, TEXT_MODELS, Stub, diffusion, model

DRAGON = "Once upon a time, there was a little dragon who"


def shown(rows):
    """Rows as the page shows them: the end mark has no text."""
    return [["" if piece == END else piece for piece in row] for row in rows]


def test_four_lanes_race_to_the_end(stub, visit):
    here = visit(stub.url)
    here.ready()
    here.slide("#samples", 2)
    here.race()
    bodies = [body for path, body in stub.bodies if path == "/v1/completions"]
    asked = {(b["model"], b.get("steps")) for b in bodies}
    assert asked == {
        ("stories", 8), ("stories/teacher", 8), ("stories/teacher", 64), ("stories-ar", None)
    }  # fmt: skip
    for body in bodies:
        assert (body["n"], body["seed"], body["temperature"]) == (2, 0, 1)
        assert (body["prompt"], body["judge"]) == (DRAGON, "stories/teacher")
    models = {entry["id"]: entry for entry in TEXT_MODELS}
    for lane, (name, steps) in enumerate(
        [("stories", 8), ("stories/teacher", 8), ("stories/teacher", 64), ("stories-ar", None)]
    ):
        body = next(b for b in bodies if (b["model"], b.get("steps")) == (name, steps))
        expected = diffusion(models[name], body)
        assert here.rows(lane) == shown(expected.final), name
        numbers = here.page.locator(".lane").nth(lane).locator("dd").all_inner_texts()
        assert numbers[0] == str(expected.steps)
        assert float(numbers[1]) > 0
        assert int(numbers[2].replace(",", "")) > 0
        assert numbers[3] == "20.0", "the geometric mean of 10 and 40"
    assert all(url.startswith(stub.url) for url in here.asked)


def test_selected_words_are_rewritten(stub, visit):
    here = visit(stub.url)
    here.ready()
    here.page.check("text=Rewrite part of a text")
    text = here.page.locator("#text")
    text.fill("Tom had a very red ball. He was glad.")
    text.evaluate("e => { e.focus(); e.setSelectionRange(10, 10); }")
    for _ in "very red":
        here.page.keyboard.press("Shift+ArrowRight")
    here.page.locator("#selected mark", has_text="very red").wait_for()
    here.race()
    bodies = [body for path, body in stub.bodies if path == "/v1/infill"]
    assert {b["model"] for b in bodies} == {"stories", "stories/teacher"}
    assert {(b["text"], b["gap"]) for b in bodies} == {("Tom had a ___ ball. He was glad.", "2")}
    counted = [body["text"] for path, body in stub.bodies if path == "/tokenize"]
    assert set(counted) == {" very red"}, "a token brings the space before it"
    for shown_text in here.texts()[:3]:
        assert shown_text.startswith("Tom had a ")
        assert shown_text.endswith(" ball. He was glad.")
    assert here.troubles() == [
        "A left-to-right model sees only what comes before, "
        "so it cannot rewrite the middle of a text."
    ]


def test_nothing_selected_is_said_before_anything_is_asked(stub, visit):
    here = visit(stub.url)
    here.ready()
    here.page.check("text=Rewrite part of a text")
    here.page.fill("#text", "No gap here.")
    here.page.locator("#text").evaluate("e => e.setSelectionRange(3, 3)")
    here.page.click("#run")
    here.page.locator("#trouble", has_text="No words are selected").wait_for()
    assert stub.bodies == []


def test_words_of_a_sample_become_the_selection(stub, visit):
    here = visit(stub.url)
    here.ready()
    here.race()
    view = here.page.locator(".lane").first
    word = view.locator(".canvas .t").nth(12)
    chosen = word.inner_text().strip()
    word.dblclick()
    view.locator("button").click()
    text = here.page.locator("#text")
    begin, end = text.evaluate("e => [e.selectionStart, e.selectionEnd]")
    whole = text.input_value()
    assert whole[begin:end].strip() == chosen
    assert begin == len("".join(here.rows(0)[0][:12])) + 1
    view.locator(".canvas").evaluate("e => getSelection().selectAllChildren(e)")
    view.locator("button").click()
    assert text.evaluate("e => [e.selectionStart, e.selectionEnd]") == [0, len(whole)]
    assert whole == "".join(here.rows(0)[0][:-5]), "what stands behind the end is no part of it"


def test_steps_can_be_looked_at_again(stub, visit):
    here = visit(stub.url)
    here.ready()
    here.race()
    body = next(b for _, b in stub.bodies if b["model"] == "stories")
    expected = diffusion(TEXT_MODELS[0], body)
    steps = here.page.locator(".lane").first.locator("input[type=range]")
    steps.focus()
    here.page.keyboard.press("Home")
    assert here.rows(0) == shown(expected.rows(0))
    for step in (1, 2, 3):
        here.page.keyboard.press("ArrowRight")
        assert here.rows(0) == shown(expected.rows(step))
        assert steps.get_attribute("aria-valuetext") == f"step {step} of 8, {step} passes"
    new = here.page.locator(".lane").first.locator(".canvas .fresh").all_text_contents()
    written = zip(expected.rows(2)[0], expected.rows(3)[0], strict=True)
    assert sorted(new) == sorted(b if b != END else "" for a, b in written if a != b)


def test_the_clock_moves_all_lanes_and_plays(stub, visit):
    here = visit(stub.url)
    here.ready()
    here.race()
    final = [here.rows(lane) for lane in range(4)]
    here.slide("#clock", 0)
    for lane in range(4):
        assert None in here.rows(lane)[0]
        assert here.rows(lane)[0][0] == "Once"
    here.page.click("#play")
    here.page.locator("#play", has_text="Pause").wait_for()
    here.page.locator("#play", has_text="Replay").wait_for()
    assert [here.rows(lane) for lane in range(4)] == final


def test_a_link_shows_the_same(stub, visit):
    here = visit(stub.url)
    here.ready()
    here.page.fill("#prompt", "Snow & fire = 100% fun? #1 Äpfel")
    here.page.fill("#seed", "41")
    here.slide("#steps", 5)
    here.slide("#many", 33)
    here.slide("#temperature", 0.7)
    here.slide("#samples", 3)
    here.page.uncheck("text=Left to right")
    here.race()
    steps = here.page.locator(".lane").nth(2).locator("input[type=range]")
    here.slide("#lane-2-step", 20)
    texts, link = here.texts(), here.page.url
    assert steps.input_value() == "20"
    before = [body for _, body in stub.bodies]
    asked = {(b["seed"], b["temperature"], b["n"], b["steps"]) for b in before}
    assert asked == {(41, 0.7, 3, 5), (41, 0.7, 3, 33)}
    stub.bodies.clear()
    there = visit(link)
    there.status("All done.")
    assert there.texts() == texts
    assert there.page.locator("#lane-2-step").input_value() == "20"
    order = lambda body: (body["model"], body.get("steps"))  # noqa: E731
    assert sorted([b for _, b in stub.bodies], key=order) == sorted(before, key=order)
    assert there.page.url == link


def test_a_link_to_an_infilling_shows_the_same(stub, visit):
    here = visit(stub.url)
    here.ready()
    here.page.check("text=Rewrite part of a text")
    here.page.select_option("#gap", "auto")
    here.race()
    there = visit(here.page.url)
    there.status("All done.")
    assert there.texts() == here.texts()
    assert "auto" in {body["gap"] for _, body in stub.bodies}
    there.page.locator("#selected mark", has_text="looked at the sea").wait_for()


def test_a_link_to_what_is_not_served_says_so(stub, visit):
    here = visit(stub.url + '#mode=prompt&prompt=x&lanes=["stories@few","gone@few"]&steps=nonsense')
    here.page.locator("#trouble", has_text="gone@few").wait_for()
    here.status("All done.")
    assert [body["steps"] for _, body in stub.bodies] == [8]


def test_stop_ends_the_work_and_keeps_what_is_there(stub, visit):
    here = visit(stub.url)
    here.ready()
    here.page.fill("#prompt", "SLOW")
    here.page.click("#run")
    here.page.locator(".lane .fresh").first.wait_for()
    here.page.click("#stop")
    here.status("Stopped.")
    assert all(said.startswith("Stopped") for said in here.troubles())
    assert len(here.troubles()) == 4
    assert here.page.locator(".lane .canvas .t:not(.mask)").count() > 4
    patience = time.monotonic() + 20
    while len(stub.left) < 4 and time.monotonic() < patience:
        time.sleep(0.05)
    assert len(stub.left) == 4, "the server sees all four clients gone"
    here.page.fill("#prompt", "Again")
    here.race()


def test_one_after_another(stub, visit):
    here = visit(stub.url)
    here.ready()
    here.page.click("summary >> text=More settings")
    here.page.select_option("#turns", "apart")
    here.race()
    lanes = [(body["model"], body.get("steps")) for _, body in stub.bodies]
    assert lanes == [
        ("stories", 8), ("stories/teacher", 8), ("stories/teacher", 64), ("stories-ar", None)
    ]  # fmt: skip


def test_proteins_are_letters_coloured_by_class(visit):
    with Stub(PROTEIN_MODELS) as stub:
        here = visit(stub.url, **PHONE)
        here.ready()
        here.race()
        letters = here.page.locator(".lane").first.locator(".canvas .t")
        assert letters.count() == 64
        colours = letters.evaluate_all(
            "all => all.map(s => [s.textContent, getComputedStyle(s).color])"
        )
    by_class: dict[str, set[str]] = {}
    for letter, colour in colours:
        kind = next(k for k in ("AVLIM", "FWY", "STNQ", "KRH", "DE", "GPC") if letter in k)
        by_class.setdefault(kind, set()).add(colour)
    assert all(len(found) == 1 for found in by_class.values())
    assert len(set.union(*by_class.values())) == len(by_class) >= 5


def test_a_lane_whose_last_steps_write_nothing_is_done(stub, visit):
    here = visit(stub.url)
    here.ready()
    here.page.fill("#prompt", "SKIP")
    here.race()
    assert here.page.locator(".scrub span").all_inner_texts()[0] == "8 of 8"
    assert here.page.locator("#lane-0-step").input_value() == "4"
    assert here.page.locator("#lane-0-step").get_attribute("max") == "4"


def test_a_uniform_state_model_is_not_asked_what_it_cannot(visit):
    with Stub([model("duo", "duo", "model")]) as stub:
        here = visit(stub.url)
        here.ready()
        here.page.check("text=Rewrite part of a text")
        here.race()
        assert {body.get("gap") for path, body in stub.bodies if path == "/v1/infill"} == {"7"}
        stub.bodies.clear()
        here.page.select_option("#gap", "auto")
        here.race()
        assert stub.bodies == []
        assert len(here.troubles()) == 2
        assert all("cannot choose how long" in said for said in here.troubles())


def test_variety_by_hand(stub, visit):
    here = visit(stub.url)
    here.ready()
    found = here.page.evaluate(
        """async () => {
            const { compare } = await import("/page/variety.js");
            return compare(["The old dog sat. A cat ran.", "the OLD dog ran up"]);
        }"""
    )
    kinds = [[word["kind"] for word in words] for words in found["words"]]
    assert kinds == [
        ["shared"] * 3 + ["only", "only", "only", "plain"],
        ["shared"] * 3 + ["plain", "only"],
    ]
    assert found["shared"] == pytest.approx(6 / 12)
    assert found["only"] == pytest.approx(4 / 12)

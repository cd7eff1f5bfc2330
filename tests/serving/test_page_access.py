"""The page in Chromium: errors in plain words, keyboard, screen reader, phone and dark."""

import pytest
from tests.serving.browser import PHONE
from tests.serving.stub_server import PROTEIN_MODELS, Stub

LOOKS = {
    "light": {"viewport": {"width": 1280, "height": 900}},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": PHONE,
}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("BUSY", "The server is busy: its queue is full. Press Write again in 7 seconds."),
        ("REFUSED", "The server refused this. Steps: steps is 8: use 1 to 4. Change it and press"),
        ("LOST", "The connection broke off. What was written until then is kept; press Write"),
        ("INSIDE", "The server gave up on this text: out of memory. Try again."),
    ],
)
def test_what_goes_wrong_is_said_in_the_lane(stub, visit, word, said):
    here = visit(stub.url)
    here.ready()
    here.page.fill("#prompt", f"One {word} two")
    here.race()
    assert len(here.troubles()) == 4
    assert all(trouble.startswith(said) for trouble in here.troubles()), here.troubles()
    kept = here.page.locator(".canvas .t:not(.mask):not(.given)").count()
    assert (kept > 0) == (word in ("LOST", "INSIDE"))
    # The browser itself notes failed requests in its console; nothing else may stand there.
    assert all("Failed to load resource" in f or "net::ERR" in f for f in here.faults)
    here.faults.clear()
    here.page.fill("#prompt", "Fine")
    here.race()
    assert here.troubles() == []


def test_a_judge_of_other_tokens_is_left_out(stub, visit):
    here = visit(stub.url)
    here.ready()
    here.page.fill("#prompt", "STRANGER")
    here.race()
    assert here.troubles() == []
    assert here.page.locator(".lane dd:last-child").nth(3).inner_text() == "–"
    assert [f for f in here.faults if "400" not in f] == []
    here.faults.clear()


def test_a_server_that_is_gone_is_named(visit):
    with Stub() as stub:
        here = visit(stub.url)
        here.ready()
    here.race()
    assert all("The server does not answer." in said for said in here.troubles())
    assert len(here.troubles()) == 4
    here.faults.clear()


def test_the_key_is_asked_for_and_kept_out_of_the_link(visit):
    with Stub(api_key="sesame") as stub:
        here = visit(stub.url)
        here.page.fill("#key", "wrong")
        here.page.click("text=Use this key")
        here.page.fill("#key", "sesame")
        here.page.click("text=Use this key")
        here.ready()
        here.race()
        assert here.troubles() == []
        assert "sesame" not in here.page.url
    here.faults.clear()


@pytest.mark.slow
@pytest.mark.parametrize("look", LOOKS)
def test_axe_finds_no_fault(stub, visit, look):
    here = visit(stub.url, reduced_motion="reduce", **LOOKS[look])
    here.ready()
    assert here.axe() == []
    here.page.click("summary >> text=More settings")
    here.page.click("summary >> text=What the numbers say")
    here.slide("#samples", 3)
    here.race()
    assert here.axe() == []
    here.slide("#clock", 100)
    assert here.axe() == []
    here.page.check("text=Rewrite part of a text")
    here.race()
    assert here.axe() == []
    here.page.check("text=Begin a text")
    here.page.fill("#prompt", "LOST")
    here.race()
    assert here.axe() == []
    here.faults.clear()


@pytest.mark.parametrize("look", LOOKS)
def test_axe_finds_no_fault_with_proteins(visit, look):
    with Stub(PROTEIN_MODELS) as stub:
        here = visit(stub.url, reduced_motion="reduce", **LOOKS[look])
        here.ready()
        here.race()
        assert here.axe() == []
        here.slide("#lane-0-step", 2)
        assert here.axe() == []


def test_all_by_keyboard(stub, visit):
    here = visit(stub.url)
    here.ready()
    here.page.evaluate("document.body.focus()")
    seen = []
    for _ in range(40):
        here.page.keyboard.press("Tab")
        focus = here.page.evaluate(
            """() => {
                const e = document.activeElement, style = getComputedStyle(e);
                return [e.id || e.name || e.textContent.trim(), parseFloat(style.outlineWidth),
                        style.outlineStyle];
            }"""
        )
        assert focus[1] >= 2, f"no visible focus: {focus}"
        assert focus[2] != "none", f"no visible focus: {focus}"
        seen.append(focus[0])
        if focus[0] == "run":
            break
    order = [
        "skip",
        "mode",
        "prompt",
        "steps",
        "many",
        "temperature",
        "samples",
        "seed",
        "lane",
        "run",
    ]
    assert [seen.index(name) for name in order] == sorted(seen.index(name) for name in order)
    here.page.keyboard.press("Enter")
    here.status("All done.")
    assert here.page.evaluate("document.activeElement.id") == "run", "focus stays where it was"


def test_ctrl_enter_writes(stub, visit):
    here = visit(stub.url)
    here.ready()
    here.page.focus("#prompt")
    here.page.keyboard.press("Control+Enter")
    here.status("All done.")
    assert here.page.evaluate("document.activeElement.id") == "prompt"


def test_the_link_is_copied_or_shown(stub, visit):
    here = visit(stub.url)
    here.context.grant_permissions(["clipboard-read", "clipboard-write"])
    here.ready()
    here.race()
    here.page.click("#share")
    here.status("The link is on the clipboard.")
    assert here.page.evaluate("navigator.clipboard.readText()") == here.page.url
    assert "seed=0" in here.page.url
    here.page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    here.page.click("#share")
    assert here.page.locator("#link").input_value() == here.page.url
    assert here.page.evaluate("getSelection().toString()") == here.page.url


def test_the_skip_link_leads_to_the_texts(stub, visit):
    here = visit(stub.url)
    here.ready()
    here.page.keyboard.press("Tab")
    here.page.keyboard.press("Enter")
    assert here.page.evaluate("document.activeElement.id") == "race"


def test_a_screen_reader_hears_ends_and_not_each_step(stub, visit):
    here = visit(stub.url)
    here.ready()
    here.page.evaluate(
        """() => {
            window.heard = [];
            const live = "[aria-live], [role=status], [role=alert], output";
            for (const region of document.querySelectorAll(live)) {
                new MutationObserver(() => window.heard.push(region.textContent))
                    .observe(region, { childList: true, characterData: true, subtree: true });
            }
        }"""
    )
    here.race()
    heard = [text for text in here.page.evaluate("window.heard") if text]
    assert here.page.locator(".lane [aria-live], .lane [role=status], .lane output").count() == 0
    assert len(heard) <= 6, "a beginning, four ends and that all are done"
    assert heard[0] == "4 lanes write."
    assert heard[-1] == "All done."
    assert here.page.locator(".mask:not([aria-hidden=true])").count() == 1, "the legend's alone"


@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_is_wider_than_a_phone(stub, visit, width):
    here = visit(stub.url, viewport={"width": width, "height": 800})
    here.ready()
    here.page.click("summary >> text=More settings")
    here.race()
    here.page.check("text=Rewrite part of a text")
    assert here.page.evaluate("document.documentElement.scrollWidth") <= width


def test_no_motion_for_who_wants_none(stub, visit):
    here = visit(stub.url, reduced_motion="reduce")
    here.ready()
    here.race()
    lasting = here.page.locator(".canvas .t").evaluate_all(
        "all => new Set(all.map(s => getComputedStyle(s).transitionDuration)).size === 1"
        " && getComputedStyle(all[0]).transitionDuration"
    )
    assert lasting == "0s"


def test_dark_is_dark(stub, visit):
    def brightness(scheme):
        here = visit(stub.url, color_scheme=scheme)
        colour = here.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour.strip("rgb()").split(",")[:3])

    assert brightness("dark") < 200 < 600 < brightness("light")

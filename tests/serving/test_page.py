"""Files of the page: all there, nothing from elsewhere, nothing that the policy would block."""

import re
from pathlib import Path

import pytest

from didi_instruct.serving.page import HEADERS, MEDIA_TYPES, page_files

FOLDER = Path(__file__).parents[2] / "src" / "didi_instruct" / "serving" / "page"
TEXTS = {path: file.content.decode() for path, file in page_files().items()}
SCRIPTS = {path: text for path, text in TEXTS.items() if path.endswith(".js")}


def test_every_file_of_the_folder_is_sent_with_its_type():
    assert {"" if p.name == "index.html" else f"page/{p.name}" for p in FOLDER.iterdir()} == set(
        TEXTS
    )
    assert page_files()[""].media_type == MEDIA_TYPES[".html"]
    assert page_files()["page/main.js"].media_type.startswith("text/javascript")


def test_the_policy_allows_this_server_alone():
    rules = dict(
        rule.strip().split(" ", 1) for rule in HEADERS["Content-Security-Policy"].split(";")
    )
    assert rules["default-src"] == "'self'"
    assert not {"script-src", "style-src", "connect-src"} & set(rules)
    assert "unsafe" not in " ".join(rules.values())


def test_what_the_page_and_its_modules_name_is_a_file_of_the_page():
    named = re.findall(r'(?:src|href)="([^"#]+)"', TEXTS[""])
    for text in SCRIPTS.values():
        named += [f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', text)]
    assert len(named) > len(SCRIPTS)
    assert set(named) <= set(TEXTS)
    reached = {n for n in named if n.endswith(".js")}
    assert reached == set(SCRIPTS), "a module that nothing imports"


@pytest.mark.parametrize("path", sorted(TEXTS))
def test_no_address_of_elsewhere(path):
    found = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", TEXTS[path]))
    assert found <= {"http://www.w3.org/2000/svg"}, "the name of SVG is an address; no other is"


def test_no_inline_script_or_style():
    page = TEXTS[""]
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", page) == []
    for text in SCRIPTS.values():
        assert re.findall(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(", text) == []


def test_every_label_names_a_control_and_every_control_has_a_name():
    page = TEXTS[""]
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'\sfor="([^"]+)"', page)) <= set(ids)
    labelled = set(re.findall(r'<label[^>]*\sfor="([^"]+)"', page))
    for tag in re.findall(r"<(?:input|select|textarea)\b[^>]*>", page):
        name = re.search(r'\sid="([^"]+)"', tag)
        assert "aria-label" in tag or 'type="radio"' in tag or name[1] in labelled, tag

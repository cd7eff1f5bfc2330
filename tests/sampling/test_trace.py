"""Traces record what happened, and their files are safe and complete."""

import html
import io
import itertools
import json
import re
import sys
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from didi_instruct.data.files import AtomicFile
from didi_instruct.data.tokenizer import Tokenizer, train_tokenizer
from didi_instruct.errors import MissingExtraError, UserError
from didi_instruct.process.schedule import LogLinear
from didi_instruct.sampling import trace_gif
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.state import PAD, Canvas, Snapshot
from didi_instruct.sampling.trace import (
    SpanState,
    Trace,
    check_path,
    find_end,
    output_ids,
    replay,
    token_texts,
    visible,
)

from .toys import law, start, toy_of

STORY = "Zoë ate naïve jalapeños 🙂 in 東京 — café!\n\nНовая строка: «привет» 👩‍👩‍👧.\tEnd. "
PARK = "The café in the park was naïve. "
MALICE = "</script><script>alert(1)</script>"
BYTES = Tokenizer.load("bytes")
WORDS = Tokenizer.from_words(["a", "cat", "sat"])
METASPACE = Backend(models.WordLevel({"▁once": 0, "▁up": 1, "on": 2, "▁a": 3, ".": 4}))
METASPACE.decoder = decoders.Metaspace()
pillow = pytest.mark.skipif(find_spec("PIL") is None, reason="draws with Pillow")
BPE = train_tokenizer([STORY, PARK + "The end."] * 3, 300)


def reveal(x, when, mask_id, steps, callback, confidence):
    """Call back as a sampler that writes x at the steps `when`; -1: given."""
    for n in range(steps):
        sure = confidence.masked_fill((when > n) | (when < 0), 0.0)
        z = x.masked_fill(when > n, mask_id)
        callback(Snapshot(n, steps, 1 - n / steps, z, when == n, sure, when >= 0))
        z.fill_(0)  # samplers reuse their memory


def pretend(rows, mask_id, steps, callback, *, given=0, seed=0):
    """Reveal `rows` at random positions."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.tensor(rows)
    when = torch.randint(0, steps, x.shape, generator=generator)
    confidence = torch.rand(x.shape, generator=generator)
    when[:, :given] = -1
    reveal(x, when.masked_fill(x == PAD, -1), mask_id, steps, callback, confidence)


def show(rows, new, mask_id=9):
    """A trace of states as they are, everything open."""
    trace, num = Trace(mask_id), len(rows)
    for n, (row, revealed) in enumerate(zip(rows, new, strict=True)):
        z, here = torch.tensor([row]), torch.tensor([revealed]).bool()
        trace(Snapshot(n, num, 1 - n / num, z, here, torch.ones(z.shape), torch.ones_like(here)))
    return trace


@st.composite
def runs(draw):
    """States of a text, from before the first step: tokens may be taken back, or changed."""
    length, steps = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    row = st.lists(st.sampled_from([0, 1, 9, 9]), min_size=length, max_size=length)
    rows = draw(st.lists(row, min_size=steps, max_size=steps))
    return [*rows, [token % 9 for token in rows[-1]]]


def traced(text, tokenizer=BPE, steps=6, **settings):
    """A trace of one sample that ends as `text`."""
    trace = Trace(tokenizer.size, tokenizer.eot_id)
    pretend([tokenizer.encode([text])[0]], tokenizer.size, steps, trace, **settings)
    return trace


def own_window(row, padding, tokenizer=BPE):
    """A trace of `row`, written from its end; end-of-text tokens that fill the window are given."""
    trace, n = Trace(tokenizer.size, tokenizer.eot_id), len(row)
    x = torch.tensor([[*row, *[tokenizer.eot_id] * padding]])
    when = torch.tensor([[(n - 1 - i) * 3 // n for i in range(n)] + [-1] * padding])
    reveal(x, when, tokenizer.size, 3, trace, torch.ones(x.shape))
    return trace


def replayed(trace, decode=BPE.decode):
    data = trace.as_dict(decode)
    return replay(data, data["samples"][0])


def play_json(sample, mask_id):
    """Tokens and pieces of text before the first step of a sample, and after each."""
    tokens, pieces = list(sample["start"]), list(sample["start_pieces"])
    yield list(tokens), list(pieces)
    for step in sample["steps"]:
        for k, position in enumerate(step["revealed"]):
            tokens[position], pieces[position] = step["tokens"][k], step["pieces"][k]
        for position in step["masked"]:
            tokens[position], pieces[position] = mask_id, ""
        yield list(tokens), list(pieces)


def letters(ids):
    return "".join(chr(65 + i) for i in ids)


class TestTexts:
    def test_a_character_belongs_to_its_last_token(self):
        texts = token_texts(BYTES.encode(["aë🙂b"])[0], BYTES.decode)
        assert texts == ["a", "", "ë", "", "", "", "🙂", "b"]

    @law
    @given(st.data(), st.sampled_from([BPE, BYTES]))
    def test_texts_join_to_the_decoded_text(self, data, tokenizer):
        """Also of tokens that are no text: one broken character must not swallow what follows."""
        ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), min_size=1, max_size=60))
        texts = token_texts(ids, tokenizer.decode)
        assert "".join(texts) == tokenizer.decode(ids)
        assert max(map(len, texts)) <= max(len(tokenizer.decode([i])) for i in ids) + 3

    @pytest.mark.parametrize(
        ("decode", "ids", "texts"),
        [
            (WORDS.decode, [0, 1, 2], ["a", " cat", " sat"]),
            (METASPACE.decode, [0, 1, 2, 3, 4], ["once", " up", "on", " a", "."]),
            (WORDS.decode, [9, 1, 9, 2], ["", " cat", "", " sat"]),
            (WORDS.decode, [9, 9], ["", ""]),
            (WORDS.decode, [PAD, 1, 2, PAD], ["", "cat", " sat", ""]),
            (WORDS.decode, [], []),
        ],
    )
    def test_spaces_come_from_the_neighbour_masks_and_padding_have_none(self, decode, ids, texts):
        assert token_texts(ids, decode, mask_id=9) == texts

    def test_the_number_of_decoded_tokens_grows_linearly(self):
        ids, decoded = BPE.encode([STORY * 20])[0], []
        texts = token_texts(ids, lambda tokens: decoded.append(len(tokens)) or BPE.decode(tokens))
        assert "".join(texts) == STORY * 20
        assert sum(decoded) < 12 * len(ids)

    @pytest.mark.parametrize("text", ["\ufffd" * 500, "a" + "\ufffd" * 500 + "b🙂"])
    def test_replacement_characters_do_not_make_it_quadratic(self, text):
        ids, decoded = BYTES.encode([text])[0], []
        texts = token_texts(ids, lambda tokens: decoded.append(len(tokens)) or BYTES.decode(tokens))
        assert "".join(texts) == text
        assert sum(decoded) < 40 * len(ids)

    def test_control_characters_become_visible(self):
        assert visible("a\x1b[2J\x00\x7f\n\tb") == "a␛[2J␀␡\n\tb"

    @pytest.mark.parametrize(
        ("row", "given", "end"),
        [
            ([9, 9, 1, 2, 9, 3, 9], [], 4),  # the first after text
            ([PAD, 8, 9, 1], [], None),
            ([1, 9, 2, 9, 3], [0, 1], 3),  # the first that was written
            ([1, 9, 2, 9, 3], [4], None),  # the text's last word is given
            ([1, 2, 9, 9, 9], [2, 3, 4], 2),  # the given end of a text with its own window
            ([9, 8, 9, 9, PAD], [2, 3, 4], 2),
            ([9, 9, 9], [2], 2),
        ],
    )
    def test_the_end_is_the_first_written_one_or_where_a_given_one_begins(self, row, given, end):
        written = [i not in given for i in range(len(row))] if given else None
        assert find_end(row, 9, 8, written) == end

    def test_the_output_has_neither_end_nor_padding(self):
        assert find_end([1, 2], None, 8) is None
        assert output_ids([1, 9, 2, 9, 9], 9, [True, True, True, False, False]) == [1, 2]
        assert output_ids([PAD, 9, 1, 2, 9, 3], 9) == [1, 2]


class TestRecording:
    def test_the_trace_of_a_sampler_replays_to_its_samples(self):
        trace = Trace(3, keep=3)
        canvas = Canvas(torch.tensor([[3, 1, 3, 3]]).expand(5, 4), 3, torch.arange(5))
        result = ancestral(toy_of(), LogLinear(0.0), start(canvas, trace), steps=6)
        data = trace.as_dict(str)
        assert json.loads(json.dumps(data)) == data
        for sample, final in zip(data["samples"], result.tokens[:3].tolist(), strict=True):
            steps = sample["steps"]
            assert sample["start"] == [3, 1, 3, 3]
            assert [step["time"] for step in steps] == pytest.approx([1 - n / 6 for n in range(6)])
            assert [*play_json(sample, 3)][-1][0] == sample["tokens"] == final
            assert sorted(i for step in steps for i in step["revealed"]) == [0, 2, 3]
            assert all(0 < p <= 1 for step in steps for p in step["confidence"])

    @law
    @given(runs())
    def test_any_run_can_be_replayed(self, rows):
        """As JSON, and as spans of text that are masked, final, or a draft of what comes later."""
        new = [
            [a != b and b != 9 for a, b in zip(*pair, strict=True)]
            for pair in itertools.pairwise(rows)
        ]
        # What was there before is known where the first step writes nothing.
        rows[0] = [9 if fresh else token for token, fresh in zip(rows[1], new[0], strict=True)]
        trace = show(rows[1:], new)
        (sample,) = trace.as_dict(letters)["samples"]
        assert [*play_json(sample, 9)] == [(row, token_texts(row, letters, 9)) for row in rows]
        played = replayed(trace, letters)
        for n, row in enumerate(rows):
            for change, token, final in zip(played.after(n), row, rows[-1], strict=True):
                shown = SpanState.SHOWN if token == final else SpanState.DRAFT
                assert change.state == (SpanState.MASKED if token == 9 else shown)
                assert token == 9 or change.text == letters([token])
        written = {i for step in new for i, fresh in enumerate(step) if fresh}
        assert [i for i, span in enumerate(played.spans) if not span.given] == sorted(written)

    def test_batches_follow_each_other(self):
        trace = Trace(9, keep=3)
        pretend([[1, 2], [3, 4]], 9, 2, trace)
        pretend([[5, 6, 7], [8, 8, 8]], 9, 4, trace, seed=1)
        pretend([[0]], 9, 1, trace)
        samples = trace.as_dict(letters)["samples"]
        assert [sample["tokens"] for sample in samples] == [[1, 2], [3, 4], [5, 6, 7]]
        assert [len(sample["steps"]) for sample in samples] == [2, 2, 4]

    def test_what_fills_a_window_after_a_given_end_is_not_shown(self):
        """A text with its own window plays like the same text in a window that it fills."""
        row = BPE.encode(["The café in the park"])[0]
        plain, padded = (replayed(own_window(row, padding)) for padding in (0, 200))
        assert plain == padded
        assert len(plain.spans) == len(row)

    def test_a_character_of_several_tokens_is_as_certain_as_the_least_certain(self):
        trace = Trace(BYTES.size)
        when, confidence = torch.tensor([[1, 0]]), torch.tensor([[0.25, 0.5]])
        reveal(torch.tensor(BYTES.encode(["ë"])), when, BYTES.size, 2, trace, confidence)
        played = replayed(trace, BYTES.decode)
        changes = [change for n in range(3) for change in played.after(n)]
        assert [change.state for change in changes] == [
            SpanState.MASKED,
            SpanState.PARTIAL,
            SpanState.SHOWN,
        ]
        assert changes[-1].confidence == 0.25


class TestHtml:
    def page(self, trace, folder, tokenizer=BPE):
        """The page, the texts of its articles, and the data for its script."""
        trace.write(folder / "trace.html", tokenizer)
        page = (folder / "trace.html").read_text(encoding="utf-8")
        for tag in ("span", "article", "script", "li"):
            assert len(re.findall(f"<{tag}\\b", page)) == page.count(f"</{tag}>")
        articles = re.findall(r"<article.*?</article>", page, re.DOTALL)
        (data,) = re.findall(r'<script type="application/json" id="data">(.*)</script>', page)
        texts = [html.unescape(re.sub(r"<[^>]*>", "", article)) for article in articles]
        return page, texts, json.loads(data)

    def test_it_needs_nothing_from_elsewhere(self, tmp_path):
        page, _, _ = self.page(traced(PARK), tmp_path)
        assert "//" not in page.replace("</", "")
        assert "default-src 'none'" in page
        assert not re.search(r"<(link|img|iframe|base|object)\b|\s(src|href|action)=", page)

    def test_the_page_has_the_text_and_steps_that_replay_to_it(self, tmp_path):
        page, texts, (data,) = self.page(traced(STORY, given=4), tmp_path)
        assert texts == ["Sample 1" + STORY]
        states = [0] * len(data["tokens"])
        for unit, state, *_ in data["start"]:
            states[unit] = state
        given = page.count('"t given') - 1  # the legend has one
        assert sum(states) == given * SpanState.SHOWN > 0
        for step in data["steps"]:
            for unit, state, *_ in step["changes"]:
                states[unit] = state
        assert states == [SpanState.SHOWN] * len(data["tokens"])
        assert data["steps"][-1]["time"] == 0.0

    def test_texts_cannot_leave_their_place(self, tmp_path):
        tokenizer = Tokenizer.from_words([MALICE, "<!--", "{{data}}", '"&amp;', "x"])
        trace = Trace(5, about={"title": MALICE, "prompt": MALICE})
        pretend([[0, 1, 2, 3, 4]], 5, 3, trace)
        drafted = show([[0, 5], [4, 1]], [[1, 0], [1, 1]], 5)  # the malicious token as a draft
        page, texts, _ = self.page(trace, tmp_path, tokenizer)
        assert texts == [f'Sample 1{MALICE} <!-- {{{{data}}}} "&amp; x']
        assert f"<title>{html.escape(MALICE)}</title>" in page
        assert f"<li>prompt {html.escape(MALICE)}</li>" in page
        draft_page, _, data = self.page(drafted, tmp_path, tokenizer)
        assert data[0]["steps"][0]["changes"][0][3] == MALICE
        for each in (page, draft_page):
            assert "<script>alert" not in each
            assert each.count("<script") == each.count("</script") == 2

    def test_the_end_is_marked_once_and_padding_is_not_shown(self, tmp_path):
        row, eot = BPE.encode(["The end"])[0], BPE.eot_id
        trace = Trace(BPE.size, eot)
        pretend([[PAD, *row, eot, eot], [*row, eot, PAD, PAD]], BPE.size, 3, trace)
        _, texts, data = self.page(trace, tmp_path)
        assert texts == ["Sample 1The endend", "Sample 2The endend"]
        assert [len(each["tokens"]) for each in data] == [len(row) + 2, len(row) + 1]


@pillow
class TestGif:
    def open(self, data):
        from PIL import Image

        return Image.open(io.BytesIO(data))

    def draw(self, trace, tokenizer=BPE):
        return self.open(trace_gif.render_gif(trace.as_dict(tokenizer.decode)))

    def frames(self, picture):
        for n in range(picture.n_frames):
            picture.seek(n)
            yield picture.convert("RGB")

    @pytest.mark.parametrize(
        ("text", "steps", "frames"),
        [(STORY, 7, 8), ("The", 12, 13), ("The end", 500, trace_gif.MAX_STEPS + 1)],
        ids=["plain", "steps that reveal nothing", "thinned"],
    )
    def test_there_is_a_frame_per_step_and_one_before(self, text, steps, frames):
        assert self.draw(traced(text, steps=steps)).n_frames == frames

    def test_frames_grow_inkier(self):
        """Blocks give way to words: dark pixels only increase."""
        dark = []
        for page in self.frames(self.draw(traced(STORY, steps=5))):
            dark.append(sum(page.convert("L").crop((0, 60, *page.size)).histogram()[:120]))
        assert dark == sorted(dark)
        assert dark[0] == 0 < dark[-1]

    def test_columns_go_in_step_and_the_faster_waits(self):
        """Of 3 and 9 steps: after the 4th frame the left half no longer changes, the right does."""
        traces = {f"{n} steps": traced(PARK, steps=n).as_dict(BPE.decode) for n in (3, 9)}
        picture = self.open(trace_gif.render_beside(traces))
        assert picture.n_frames == 10
        assert picture.width <= 800
        (width, height), left, right = picture.size, [], []
        for page in self.frames(picture):
            left.append(page.crop((0, 0, width // 2, height)).tobytes())
            right.append(page.crop((width // 2, 0, width, height)).tobytes())
        assert (len(set(left[:4])), len(set(left[4:])), len(set(right))) == (4, 1, 10)
        assert left[3] not in left[4:]  # what is new is coloured, in one frame only

    def test_a_long_text_stays_for_longer(self):
        stays = []
        for text in ("The end", PARK * 20):
            picture = self.draw(traced(text, steps=4))
            picture.seek(4)
            stays.append(picture.info["duration"])
        assert 2000 <= stays[0] < 3000 < stays[1] <= 6000

    def test_lines_break_between_words(self):
        spans = replayed(traced(PARK * 3)).spans
        lines = {}
        for span, box in zip(spans, trace_gif.lay_out(spans, len, 20), strict=True):
            assert box.x + box.width <= 20 or not box.word  # a space may hang over
            lines[box.line] = lines.get(box.line, "") + span.text
        assert [line.strip() for line in lines.values()][:3] == [
            "The café in the park",
            "was naïve. The café",
            "in the park was",
        ]

    def test_a_word_longer_than_a_line_breaks_between_tokens(self):
        boxes = trace_gif.lay_out(replayed(traced("MKV" * 10, BYTES), BYTES.decode).spans, len, 8)
        assert [(box.x, box.line) for box in boxes] == [(i % 8, i // 8) for i in range(30)]

    def test_line_breaks_and_ends_of_text_have_their_place(self):
        trace = Trace(9, eot_id=8)
        pretend([[0, 10, 10, 1, 8, 8]], 9, 2, trace)
        played = replayed(
            trace, lambda ids: "".join("\n" if i == 10 else letters([i]) for i in ids)
        )
        assert played.ends == [4, 5]
        boxes = trace_gif.lay_out(played.spans, len, 20)
        assert [(box.word, box.x, box.line) for box in boxes] == [
            *[("A", 0, 0), ("", 1, 0), ("", 0, 1)],
            *[("B", 0, 2), ("end", 2, 2), ("·", 6, 2)],
        ]

    def test_it_works_without_matplotlib(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        trace_gif.font.cache_clear()
        assert self.draw(traced("The end", steps=3)).n_frames == 4
        trace_gif.font.cache_clear()

    def test_without_pillow_it_says_what_to_install(self, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "PIL", None)
        check_path(tmp_path / "trace.html")
        with pytest.raises(MissingExtraError, match=r"A GIF trace.*didi-instruct\[eval\]"):
            check_path(tmp_path / "trace.gif")
        with pytest.raises(MissingExtraError):
            trace_gif.render_beside({"a": traced("The end").as_dict(BPE.decode)})


class TestFiles:
    def test_json_has_the_output_and_replays_to_it(self, tmp_path):
        trace = Trace(BPE.size, BPE.eot_id, about={"seed": 7})
        row = [*BPE.encode(["The café"])[0], BPE.eot_id, *BPE.encode(["The end"])[0]]
        pretend([row], BPE.size, 4, trace, given=1)
        trace.write(str(tmp_path / "trace.JSON"), BPE)
        written = json.loads((tmp_path / "trace.JSON").read_text(encoding="utf-8"))
        assert (written["about"], written["mask_id"]) == ({"seed": 7}, BPE.size)
        (sample,) = written["samples"]
        assert sample["start"] == [row[0], *[BPE.size] * (len(row) - 1)]
        *_, (tokens, pieces) = play_json(sample, BPE.size)
        assert tokens == sample["tokens"] == row
        assert "".join(pieces) == "".join(sample["pieces"]) == "The café<|endoftext|>The end"
        assert sample["text"] == "The café"
        assert row[sample["end"]] == BPE.eot_id

    def test_without_a_tokenizer_ids_are_shown(self, tmp_path):
        trace = Trace(99)
        pretend([[5, 12, 7]], 99, 2, trace)
        trace.write(tmp_path / "trace.json", None)
        assert json.loads((tmp_path / "trace.json").read_text())["samples"][0]["text"] == "5 12 7"

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("trace.mp4", r"one of \.html, \.gif, \.json, not `\.mp4`"),
            ("trace", "one of"),
            ("missing/trace.html", "no folder"),
            ("folder.html", "is a folder"),
        ],
    )
    def test_bad_places_are_refused(self, tmp_path, name, reason):
        (tmp_path / "folder.html").mkdir()
        with pytest.raises(UserError, match=reason):
            check_path(tmp_path / name)
        with pytest.raises(UserError, match=reason):
            traced("The end").write(tmp_path / name, BPE)

    def test_an_empty_trace_is_refused(self, tmp_path):
        with pytest.raises(UserError, match="no step was traced"):
            Trace(3).write(tmp_path / "trace.html", BPE)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("suffix", "start"),
        [("html", b"<!"), pytest.param("gif", b"GIF", marks=pillow), ("json", b"{")],
    )
    def test_files_are_replaced_whole_or_not_at_all(self, tmp_path, monkeypatch, suffix, start):
        path = tmp_path / f"trace.{suffix}"
        path.write_text("before")

        def full(self):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(AtomicFile, "commit", full)
            with pytest.raises(UserError, match="the disk is full"):
                traced("The end").write(path, BPE)
        assert path.read_text() == "before"
        traced("The end").write(path, BPE)
        assert path.read_bytes().startswith(start)
        assert list(tmp_path.iterdir()) == [path]

"""Traces: what is collected is what happened, and what is written is safe and whole."""

import io
import json
from html.parser import HTMLParser

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from didi_instruct.data.files import AtomicFile
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.data.tokenizer import Tokenizer, train_tokenizer
from didi_instruct.errors import MissingExtraError, UserError
from didi_instruct.process.schedule import LogLinear
from didi_instruct.sampling import trace_gif
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.chain import PAD, Canvas, Step
from didi_instruct.sampling.trace import Trace, check_path
from didi_instruct.sampling.trace_layout import lay_out
from didi_instruct.sampling.trace_text import find_end, output_ids, token_texts, visible
from didi_instruct.sampling.trace_view import State, view

STORY = "Zoë ate naïve jalapeños 🙂 in 東京 — café!\n\nНовая строка: «привет» 👩‍👩‍👧.\tEnd. "
MALICE = "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def bpe():
    return train_tokenizer([STORY, "The café in the park was naïve. The end."] * 3, 300)


def pretend(rows, mask_id, steps, callback, *, given=0, seed=0):
    """Reveal `rows` at random positions, as a sampler would."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.tensor(rows)
    when = torch.randint(0, steps, x.shape, generator=generator)
    sure = torch.rand(x.shape, generator=generator)
    when[:, :given] = -1
    when[x == PAD] = -1
    for n in range(steps):
        z = x.masked_fill(when > n, mask_id)
        known = sure.masked_fill((when > n) | (when < 0), 0.0)
        callback(Step(n, steps, 1 - n / steps, z, when == n, known))


def traced(text, tokenizer, steps=6, **settings):
    """A trace of one sample that ends as `text`."""
    trace = Trace(tokenizer.size, tokenizer.eot_id)
    pretend([tokenizer.encode([text])[0]], tokenizer.size, steps, trace, **settings)
    return trace


def own_window(row, padding, tokenizer, callback, steps=3):
    """Write `row` from its end; the end-of-text tokens that fill the window are given."""
    x = torch.tensor([[*row, *[tokenizer.eot_id] * padding]])
    when = (len(row) - 1 - torch.arange(x.shape[1])) * steps // len(row)
    when = torch.where(torch.arange(x.shape[1]) < len(row), when, -1)[None]
    for n in range(steps):
        z = x.masked_fill(when > n, tokenizer.size)
        now = when == n
        callback(Step(n, steps, 1 - n / steps, z, now, now.float(), when >= 0))


def metaspace():
    vocabulary = {"▁once": 0, "▁up": 1, "on": 2, "▁a": 3, ".": 4}
    backend = Backend(models.WordLevel(vocabulary))
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend)


class TestTexts:
    def test_texts_join_to_the_decoded_text(self, bpe):
        for tokenizer in (bpe, Tokenizer.load("bytes")):
            ids = tokenizer.encode([STORY])[0]
            assert "".join(token_texts(ids, tokenizer.decode)) == STORY

    def test_a_character_belongs_to_its_last_token(self):
        tokenizer = Tokenizer.load("bytes")
        texts = token_texts(tokenizer.encode(["aë🙂b"])[0], tokenizer.decode)
        assert texts == ["a", "", "ë", "", "", "", "🙂", "b"]

    @pytest.mark.parametrize("seed", range(20))
    def test_broken_characters_lose_nothing(self, bpe, seed):
        generator = torch.Generator().manual_seed(seed)
        for tokenizer in (bpe, Tokenizer.load("bytes")):
            ids = torch.randint(0, tokenizer.size, (60,), generator=generator).tolist()
            texts = token_texts(ids, tokenizer.decode)
            assert "".join(texts) == tokenizer.decode(ids)
            # One bad place must not swallow what follows.
            assert max(map(len, texts)) <= max(len(tokenizer.decode([i])) for i in ids) + 3

    def test_spaces_come_from_the_neighbour(self):
        words = Tokenizer.from_words(["a", "cat", "sat"])
        assert token_texts([0, 1, 2], words.decode) == ["a", " cat", " sat"]
        assert token_texts([0, 1, 2, 3, 4], metaspace().decode) == ["once", " up", "on", " a", "."]

    def test_masks_and_padding_have_no_text_and_leave_the_rest_as_it_is(self):
        words = Tokenizer.from_words(["a", "cat", "sat"])
        assert token_texts([3, 1, 3, 2], words.decode, 3) == ["", " cat", "", " sat"]
        assert token_texts([3, 3], words.decode, 3) == ["", ""]
        assert token_texts([PAD, 1, 2, PAD], words.decode, 3) == ["", "cat", " sat", ""]
        assert token_texts([], words.decode) == []

    def test_long_rows_take_few_decoded_tokens(self, bpe):
        """The price grows with the length, not with its square."""
        ids, seen = bpe.encode([STORY * 20])[0], 0

        def decode(tokens):
            nonlocal seen
            seen += len(tokens)
            return bpe.decode(tokens)

        token_texts(ids, decode)
        assert seen < 12 * len(ids)

    def test_control_characters_become_visible(self):
        assert visible("a\x1b[2J\x00\x7f\n\tb") == "a␛[2J␀␡\n\tb"

    def test_the_end_is_the_first_end_of_text_after_text(self):
        assert find_end([9, 9, 1, 2, 9, 3, 9], 9, 8) == 4
        assert find_end([PAD, 8, 9, 1], 9, 8) is None
        assert find_end([1, 2], None, 8) is None
        given = [True, True, False, False, False]
        written = [not g for g in given]
        assert find_end([1, 9, 2, 9, 3], 9, 8, written) == 3  # not the one in the prompt
        assert find_end([1, 9, 2, 9, 3], 9, 8, [True, True, True, True, False]) is None

    def test_a_given_end_is_the_end(self):
        """What fills the window of a text is cut; a mask or a word before it is not."""
        window = [True, True, False, False, False]
        assert find_end([1, 2, 9, 9, 9], 9, 8, window) == 2
        assert find_end([9, 8, 9, 9, PAD], 9, 8, window) == 2  # one is written beside it
        assert find_end([9, 9, 9], 9, 8, [True, True, False]) == 2
        assert output_ids([1, 9, 2, 9, 9], 9, [True, True, True, False, False]) == [1, 2]


class TestCollecting:
    @pytest.fixture
    def run(self):
        language = OracleLanguage.tiny()
        trace = Trace(3, keep=3)
        given = torch.tensor([[3, 1, 3, 3]]).expand(5, 4)
        canvas = Canvas(given, 3, torch.arange(5))
        result = ancestral(language.denoiser, LogLinear(0.0), canvas, steps=6, callback=trace)
        return trace, result

    def test_the_steps_replay_to_the_samples(self, run):
        trace, result = run
        assert len(trace.samples) == 3
        for sample, tokens in zip(trace.samples, result.tokens.tolist(), strict=False):
            assert sample.start == [3, 1, 3, 3]
            assert len(sample.steps) == 6
            assert sample.rows(3)[-1] == tokens

    def test_every_position_is_revealed_once(self, run):
        trace, _ = run
        for sample in trace.samples:
            assert sorted(i for step in sample.steps for i in step.revealed) == [0, 2, 3]
            assert all(0 < c <= 1 for step in sample.steps for c in step.confidence)
            assert [step.time for step in sample.steps] == sorted(
                (step.time for step in sample.steps), reverse=True
            )

    def test_all_is_plain_python(self, run):
        trace, _ = run
        assert json.loads(json.dumps(trace.as_dict(str))) == trace.as_dict(str)

    def test_batches_follow_each_other(self):
        trace = Trace(9, keep=3)
        pretend([[1, 2], [3, 4]], 9, 2, trace)
        pretend([[5, 6, 7], [8, 8, 8]], 9, 4, trace, seed=1)
        pretend([[0]], 9, 1, trace)
        assert [s.rows(9)[-1] for s in trace.samples] == [[1, 2], [3, 4], [5, 6, 7]]
        assert [len(s.steps) for s in trace.samples] == [2, 2, 4]

    def test_masking_again_and_writing_anew_replay(self):
        """A sampler that takes back a token, and one that changes it without a mask."""
        rows = [[1, 9, 9], [1, 2, 9], [9, 2, 3], [4, 5, 3]]
        new = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]]
        trace = Trace(9)
        for n, (row, revealed) in enumerate(zip(rows, new, strict=True)):
            z, written = torch.tensor([row]), torch.tensor([revealed]).bool()
            trace(Step(n, 4, 1.0, z, written, torch.ones(1, 3)))
        (sample,) = trace.samples
        assert sample.rows(9) == [[9, 9, 9], *rows]
        assert [step.masked for step in sample.steps] == [[], [], [0], []]
        shown = view(data := trace.as_dict(letters), data["samples"][0])
        states = [list(states) for states, _, _ in shown.frames()]
        masked, final, draft = State.MASKED, State.SHOWN, State.DRAFT
        assert states[1:] == [
            [draft, masked, masked],
            [draft, draft, masked],
            [masked, draft, final],
            [final, final, final],
        ]
        assert [texts[0] for _, texts, _ in shown.frames()][-1] == "E"

    def test_texts_that_never_had_masks_start_as_drafts(self):
        trace = Trace(9)
        for n, (row, new) in enumerate([([1, 2], [True, False]), ([1, 3], [False, True])]):
            trace(Step(n, 2, 1.0, torch.tensor([row]), torch.tensor([new]), torch.ones(1, 2)))
        shown = view(data := trace.as_dict(letters), data["samples"][0])
        states, texts, _ = next(shown.frames())
        assert states == [State.MASKED, State.DRAFT]
        assert texts[1] == "C"
        assert not any(unit.given for unit in shown.units)

    def test_keeping_none_is_refused(self):
        with pytest.raises(UserError, match="keep is 0"):
            Trace(3, keep=0)


def letters(ids):
    return "".join(chr(65 + i) for i in ids)


class Page(HTMLParser):
    """Elements and texts of a page; complains about tags that do not match."""

    VOID = frozenset({"meta", "input", "br"})

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.inside, self.scripts = [], [], {}, []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        for tag in set(self.open):
            self.inside[tag] = self.inside.get(tag, "") + data


class TestHtml:
    def page(self, trace, tokenizer, folder):
        trace.write(folder / "trace.html", tokenizer)
        return (folder / "trace.html").read_text(encoding="utf-8")

    def test_it_needs_nothing_from_elsewhere(self, bpe, tmp_path):
        text = self.page(traced("The café in the park.", bpe), bpe, tmp_path)
        assert "http:" not in text.replace("http-equiv", "")
        assert "https:" not in text
        assert "//" not in text.replace("</", "")
        for tag, attributes in Page(text).tags:
            assert tag not in {"link", "img", "iframe", "base", "object"}
            assert not {"src", "href", "action"} & attributes.keys()
        assert "default-src 'none'" in text

    def test_the_final_text_is_in_the_page(self, bpe, tmp_path):
        page = Page(self.page(traced(STORY, bpe), bpe, tmp_path))
        assert page.inside["article"] == "Sample 1" + STORY

    def test_the_embedded_steps_replay(self, bpe, tmp_path):
        text = self.page(traced(STORY, bpe, given=4), bpe, tmp_path)
        (data,) = embedded(text)
        spans = [a for t, a in Page(text).tags if t == "span" and a.get("class", "")[:2] == "t "]
        states = [0] * len(data["tokens"])
        for unit, state, *_ in data["start"]:
            states[unit] = state
        given = sum(states) // State.SHOWN
        assert given == sum("given" in a["class"] for a in spans) - 1  # the legend has one
        for step in data["steps"]:
            for unit, state, *_ in step["changes"]:
                states[unit] = state
        assert states == [State.SHOWN] * len(data["tokens"])
        assert data["steps"][-1]["time"] == 0.0

    def test_texts_cannot_leave_their_place(self, tmp_path):
        tokenizer = Tokenizer.from_words([MALICE, "<!--", "%%data%%", '"&amp;', "x"])
        trace = Trace(5, about={"title": MALICE, "prompt": MALICE})
        pretend([[0, 1, 2, 3, 4]], 5, 3, trace)
        wrong = Trace(5)
        for n, row in enumerate([[0, 5], [4, 1]]):  # the malicious token as a draft
            z = torch.tensor([row])
            wrong(Step(n, 2, 1 - n / 2, z, z != 5, torch.ones(1, 2)))
        for each in (trace, wrong):
            text = self.page(each, tokenizer, tmp_path)
            assert MALICE not in text
            page = Page(text)
            assert [tag for tag, _ in page.tags].count("script") == 2
            assert json.loads(page.scripts[0]) == embedded(text)
            assert "alert" not in "".join(page.scripts[1:])
        assert embedded(text)[0]["steps"][0]["changes"][0][3] == MALICE
        text = self.page(trace, tokenizer, tmp_path)
        assert MALICE in Page(text).inside["article"]
        assert Page(text).inside["title"] == MALICE

    def test_the_end_of_text_is_marked_once(self, bpe, tmp_path):
        trace = Trace(bpe.size, bpe.eot_id)
        pretend([[*bpe.encode(["The end"])[0], *[bpe.eot_id] * 3]], bpe.size, 3, trace)
        page = Page(self.page(trace, bpe, tmp_path))
        assert page.inside["article"] == "Sample 1" + "The end" + "end"

    def test_what_fills_a_window_after_a_given_end_is_not_shown(self, bpe, tmp_path):
        row = bpe.encode(["The end"])[0]
        trace = Trace(bpe.size, bpe.eot_id)
        own_window(row, 7, bpe, trace)
        text = self.page(trace, bpe, tmp_path)
        assert Page(text).inside["article"] == "Sample 1The end"
        assert len(embedded(text)[0]["tokens"]) == len(row)
        assert f"<li>{len(row)} tokens</li>" in text

    def test_padding_is_not_shown(self, bpe, tmp_path):
        row = bpe.encode(["The end"])[0]
        trace = Trace(bpe.size, bpe.eot_id)
        pretend([[PAD, *row], [*row, PAD]], bpe.size, 3, trace)
        text = self.page(trace, bpe, tmp_path)
        assert Page(text).inside["article"] == "Sample 1The endSample 2The end"
        assert len(embedded(text)[0]["tokens"]) == len(row)


def embedded(text):
    start = text.index(">", text.index('<script type="application/json"')) + 1
    return json.loads(text[start : text.index("</script>", start)])


class TestGif:
    def frames(self, trace, tokenizer, folder):
        image = pytest.importorskip("PIL.Image")
        trace.write(folder / "trace.gif", tokenizer)
        return image.open(folder / "trace.gif")

    def test_one_frame_per_step_and_one_before(self, bpe, tmp_path):
        picture = self.frames(traced(STORY, bpe, steps=7), bpe, tmp_path)
        assert picture.n_frames == 8
        picture.seek(7)
        assert picture.info["duration"] >= 2000

    def test_steps_that_reveal_nothing_have_a_frame_too(self, bpe, tmp_path):
        assert self.frames(traced("The", bpe, steps=12), bpe, tmp_path).n_frames == 13

    def test_very_long_traces_are_thinned(self, bpe, tmp_path):
        picture = self.frames(traced("The end", bpe, steps=500), bpe, tmp_path)
        assert picture.n_frames == trace_gif.MOST_STEPS + 1

    def test_a_usual_trace_is_small(self, bpe, tmp_path):
        words = "The café in the park was naïve. " * 40
        trace = Trace(bpe.size)
        pretend([bpe.encode([words])[0][:256]], bpe.size, 16, trace)
        self.frames(trace, bpe, tmp_path)
        assert (tmp_path / "trace.gif").stat().st_size < 1_500_000

    def test_frames_grow_inkier(self, bpe, tmp_path):
        """Blocks give way to words: dark pixels only increase."""
        picture = self.frames(traced(STORY, bpe, steps=5), bpe, tmp_path)
        dark = []
        for n in range(6):
            picture.seek(n)
            dark.append(sum(picture.convert("L").crop((0, 60, *picture.size)).histogram()[:120]))
        assert dark == sorted(dark)
        assert dark[0] == 0 < dark[-1]

    def test_what_fills_a_window_after_a_given_end_is_not_drawn(self, bpe, tmp_path):
        """A text with its own window is drawn like the same text in a window that it fills."""
        row = bpe.encode(["The café in the park"])[0]
        pictures = []
        for padding in (0, 200):
            trace = Trace(bpe.size, bpe.eot_id)
            own_window(row, padding, bpe, trace)
            picture = self.frames(trace, bpe, tmp_path)
            pictures.append((picture.n_frames, picture.size, picture.convert("RGB").tobytes()))
        assert pictures[0] == pictures[1]

    def test_columns_go_in_step_and_the_faster_waits(self, bpe):
        """Of 3 and 9 steps: after the 4th frame the left half no longer changes, the right does."""
        image = pytest.importorskip("PIL.Image")
        traces = {
            f"{n} steps": traced("The café in the park was naïve.", bpe, steps=n).as_dict(
                bpe.decode
            )
            for n in (3, 9)
        }
        data = trace_gif.render_beside(traces)
        picture = image.open(io.BytesIO(data))
        assert picture.n_frames == 10
        assert picture.width <= 800
        middle, left, right = picture.width // 2, [], []
        for n in range(10):
            picture.seek(n)
            page = picture.convert("RGB")
            left.append(page.crop((0, 0, middle, picture.height)).tobytes())
            right.append(page.crop((middle, 0, *picture.size)).tobytes())
        assert len(set(left[:4])) == 4
        assert len(set(left[4:])) == 1
        assert len(set(right)) == 10

    def test_a_long_text_stays_for_longer(self, bpe, tmp_path):
        stays = []
        for text in ("The end", "The café in the park was naïve. " * 20):
            picture = self.frames(traced(text, bpe, steps=4), bpe, tmp_path)
            picture.seek(4)
            stays.append(picture.info["duration"])
        assert 2000 <= stays[0] < 3000 < stays[1] <= 6000

    def test_lines_break_between_words(self, bpe):
        trace = traced("The café in the park was naïve. " * 3, bpe)
        data = trace.as_dict(bpe.decode)
        shown = view(data, data["samples"][0])
        boxes = lay_out(shown.units, len, 20)
        lines = {}
        for unit, box in zip(shown.units, boxes, strict=True):
            assert box.x + box.width <= 20 or box.word == " "  # a space may hang over
            lines[box.line] = lines.get(box.line, "") + unit.text
        assert [line.strip() for line in lines.values()][:3] == [
            "The café in the park",
            "was naïve. The café",
            "in the park was",
        ]

    def test_a_word_longer_than_a_line_breaks_between_tokens(self):
        protein = Tokenizer.load("bytes")
        data = traced("MKV" * 10, protein).as_dict(protein.decode)
        boxes = lay_out(view(data, data["samples"][0]).units, len, 8)
        assert [box.line for box in boxes] == [i // 8 for i in range(30)]

    def test_it_works_without_matplotlib(self, bpe, tmp_path, monkeypatch):
        hide(monkeypatch, "matplotlib")
        assert self.frames(traced("The end", bpe, steps=3), bpe, tmp_path).n_frames == 4

    def test_without_pillow_it_says_what_to_install(self, monkeypatch, tmp_path):
        hide(monkeypatch, "PIL")
        with pytest.raises(MissingExtraError, match=r"A GIF trace.*didi-instruct\[eval\]"):
            check_path(tmp_path / "trace.gif")
        check_path(tmp_path / "trace.html")


def hide(monkeypatch, name):
    real = trace_gif.importlib.util.find_spec
    hidden = lambda wanted: None if wanted == name else real(wanted)  # noqa: E731
    monkeypatch.setattr(trace_gif.importlib.util, "find_spec", hidden)
    trace_gif.font.cache_clear()


class TestFiles:
    def test_json_has_the_output_and_replays_to_it(self, bpe, tmp_path):
        trace = Trace(bpe.size, bpe.eot_id, about={"seed": 7})
        row = [*bpe.encode(["The café"])[0], bpe.eot_id, *bpe.encode(["The end"])[0]]
        pretend([row], bpe.size, 4, trace, given=1)
        trace.write(str(tmp_path / "trace.JSON"), bpe)
        written = json.loads((tmp_path / "trace.JSON").read_text(encoding="utf-8"))
        assert (written["about"], written["mask_id"]) == ({"seed": 7}, bpe.size)
        (sample,) = written["samples"]
        tokens, pieces = sample["start"], sample["start_pieces"]
        assert [token for token in tokens if token != bpe.size] == row[:1]
        for step in sample["steps"]:
            parts = zip(step["revealed"], step["tokens"], step["pieces"], strict=True)
            for position, token, piece in parts:
                tokens[position], pieces[position] = token, piece
        assert tokens == sample["tokens"] == row
        assert "".join(pieces) == "".join(sample["pieces"]) == "The café<|endoftext|>The end"
        assert sample["text"] == "The café"
        assert row[sample["end"]] == bpe.eot_id

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
    def test_bad_places_are_refused(self, bpe, tmp_path, name, reason):
        (tmp_path / "folder.html").mkdir()
        with pytest.raises(UserError, match=reason):
            check_path(tmp_path / name)
        with pytest.raises(UserError, match=reason):
            traced("The end", bpe).write(tmp_path / name, bpe)

    def test_an_empty_trace_is_refused(self, bpe, tmp_path):
        with pytest.raises(UserError, match="no step was traced"):
            Trace(3).write(tmp_path / "trace.html", bpe)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("suffix", ["html", "gif", "json"])
    def test_files_are_replaced_whole_or_not_at_all(self, bpe, tmp_path, monkeypatch, suffix):
        path = tmp_path / f"trace.{suffix}"
        path.write_text("before")

        def full(self):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(AtomicFile, "commit", full)
            with pytest.raises(UserError, match="the disk is full"):
                traced("The end", bpe).write(path, bpe)
        assert path.read_text() == "before"
        assert list(tmp_path.iterdir()) == [path]
        traced("The end", bpe).write(path, bpe)
        assert path.read_bytes() != b"before"
        assert list(tmp_path.iterdir()) == [path]

    def test_the_same_trace_gives_the_same_file(self, bpe):
        data = traced(STORY, bpe).as_dict(bpe.decode)
        assert trace_gif.render(data) == trace_gif.render(data)
        assert io.BytesIO(trace_gif.render(data)).read(3) == b"GIF"

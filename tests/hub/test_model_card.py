"""The model card: what it says is what the files say, and the hub can read it."""

import json
import re
import shlex
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml

import didi_instruct as didi
from didi_instruct.config.model import ModelConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.errors import UserError
from didi_instruct.hub import export
from didi_instruct.hub.model_card import MARK, CardOptions, model_card, read_numbers
from didi_instruct.hub.privacy import publishable, without_paths
from didi_instruct.models.checkpoint import LoadedModel
from didi_instruct.models.discriminator import build_discriminator
from didi_instruct.models.dit import build_model

CONFIG = ModelConfig(layers=1, hidden=32, heads=2, cond_dim=8, length=32, vocab_size=65)
PROVENANCE = {
    "recipe": {
        "method": "token-matching",
        "data": {"source": "/home/ann/texts|one"},
        "train": {"batch_size": 8, "seed": 5},
        "optim": {"lr": 3e-4},
    },
    "teacher": "ab" * 32,
    "step": 90,
    "quick_evaluation": {
        "teacher": {"path_kl_4": 14.97, "path_kl_4_se": 0.123, "unique_4gram_4": 0.5},
        "student": {"path_kl_4": 13.5},
    },
    "didi_instruct": "0.1.0",
}


def make(provenance=None, **parts):
    torch.manual_seed(0)
    tokenizer = OracleLanguage.default().tokenizer
    network = build_model(CONFIG)
    return didi.Model(network, CONFIG, tokenizer, provenance=provenance, **parts)


def card(name="x", config=CONFIG, provenance=None):
    """The card of a model without a tokenizer."""
    model = LoadedModel(build_model(config), config, provenance=provenance or {})
    return model_card(name, model, CardOptions())


def parsed(text):
    """Front matter by a YAML reader of its own, and the rest."""
    _, matter, body = text.split("---\n", 2)
    return yaml.safe_load(matter), body


def test_a_saved_model_has_a_card_that_the_hub_reads(tmp_path):
    model = make(PROVENANCE, discriminator=build_discriminator(CONFIG))
    model.save(tmp_path / "mine", license="apache-2.0")
    text = (tmp_path / "mine" / "README.md").read_text()
    matter, body = parsed(text)
    assert huggingface_hub.ModelCard(text).data.to_dict() == matter
    assert matter["license"] == "apache-2.0"
    assert matter["pipeline_tag"] == "text-generation"
    assert matter["library_name"] == "didi-instruct"
    assert "base_model" not in matter
    parameters = sum(p.numel() for p in model.network.parameters())
    critic = sum(p.numel() for p in model.discriminator.parameters())
    for line in (
        f"| parameters | {parameters:,} |",
        f"| discriminator | {critic:,} parameters |",
        "| layers × hidden × heads | 1 × 32 × 2 |",
        "| mask id | 64 |",
        "| data | texts\\|one |",
        "| method | token-level matching |",
        "| steps | 90 |",
        f"| teacher (SHA-256 of its weights) | {'ab' * 32} |",
        "| | teacher | student |",
        "| `path_kl_4` | 14.97 ± 0.12 | 13.5 |",
        "| `unique_4gram_4` | 0.5 | – |",
        "didi generate mine --steps 16 --num 4",
    ):
        assert f"{line}\n" in body, line
    assert "/home/ann" not in text
    assert str(tmp_path) not in text
    assert didi.load(tmp_path / "mine").provenance == PROVENANCE  # the folder keeps it all


def test_what_is_unknown_is_not_claimed():
    text = card()
    matter, body = parsed(text)
    assert "license" not in matter
    assert "Unknown: ask who published" in body
    assert "say nothing about how it was trained" in body
    assert "## Numbers" not in body
    assert "didi generate" not in body  # it has no tokenizer
    assert "model.sample(" in body


def test_names_of_any_form_are_quoted():
    """What is to be typed can be typed, and a note is text."""
    odd = {"foreign": {"source": "x", "notes": ["a | <script>\n# b"]}}
    text = card("my 'own", provenance=odd)
    line = next(line for line in text.splitlines() if line.startswith("didi info"))
    assert shlex.split(line) == ["didi", "info", "my 'own"]
    assert 'didi.load("my \'own")' in text
    assert "- a \\| &lt;script> # b\n" in text


@pytest.mark.parametrize("kind", ["duo", "ar"])
def test_other_kinds_have_no_mask(kind):
    config = ModelConfig(kind=kind, layers=1, hidden=32, heads=2, vocab_size=64, length=8)
    matter, body = parsed(card(config=config))
    assert not re.search(r"mask id \| \d", body)
    assert matter["tags"][1] == {"duo": "uniform-state-diffusion", "ar": "left-to-right"}[kind]


def test_the_origin_of_foreign_weights_is_told():
    foreign = {
        "source": "someone/mdlm@main", "hub": "someone/mdlm", "layout": "mdlm-hub",
        "weights": "only", "notes": ["It has no tokenizer."],
    }  # fmt: skip
    text = card(provenance={"foreign": foreign})
    matter, body = parsed(text)
    assert matter["base_model"] == "someone/mdlm"
    assert "Read from `someone/mdlm@main` (layout `mdlm-hub`, weights `only`)." in body
    assert "- It has no tokenizer." in body


@pytest.mark.parametrize(
    "odd", [{"recipe": 3}, {"quick_evaluation": {"teacher": [1]}}, {"foreign": "x"}, {"step": None}]
)
def test_provenance_of_any_form_makes_a_card(odd):
    assert "## Architecture" in card(provenance=odd)


def test_words_that_someone_wrote_stay(tmp_path):
    model = make()
    model.save(tmp_path)
    assert MARK in (tmp_path / "README.md").read_text()
    model.save(tmp_path, license="mit")  # its own card is brought up to date
    assert "license: mit" in (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text("# Mine\n")
    model.save(tmp_path)
    assert (tmp_path / "README.md").read_text() == "# Mine\n"


def test_paths_of_a_machine_are_shortened():
    value = {"a": ["/x/y", "hf:z", "a/b"], "b": {"c": "~/q.txt", "d": 3}, "e": "C:\\u\\v"}
    assert without_paths(value) == {
        "a": ["y", "hf:z", "a/b"],
        "b": {"c": "q.txt", "d": 3},
        "e": "v",
    }


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("see /home/ann/x and ../../acme/data", "see x and data"),
        ("didi distill --out=/home/ann/o.", "didi distill --out=o."),
        ("file:///home/ann/x", "x"),
        ("(~/a/b), '~ann/c' and $HOME/d", "(b), 'c' and d"),
        ("PATH=/usr/bin:/home/ann", "PATH=bin:…"),
        ("it is in C:\\Users\\ann\\x", "it is in x"),
        ("texts/../../acme/x", "x"),
        ("with hf_abcdefgh12 at https://hf.co/a/b", "with hf_… at https://hf.co/a/b"),
        ("owner/name, 1/2, and/or, a / b, ...", "owner/name, 1/2, and/or, a / b, ..."),
    ],
)
def test_paths_are_found_wherever_they_stand(text, public):
    assert without_paths(text) == public
    assert without_paths({text: [text]}) == {public: [public]}


def test_only_what_is_known_to_be_public_is_published():
    secret = {
        "command": "didi distill", "host": "lab7", "step": 5, "padding": {"id": 3, "bias": 0.5},
        "recipe": {"data": {"source": "acme/texts.txt", "field": "text"}, "note": "~/x"},
        "foreign": {"source": "acme/run/last.ckpt", "layout": "lightning"},
    }  # fmt: skip
    assert publishable(secret) == {
        "step": 5,
        "padding": {"id": 3, "bias": 0.5},
        "recipe": {"data": {"source": "texts.txt", "field": "text"}, "note": "x"},
        "foreign": {"source": "last.ckpt", "layout": "lightning"},
    }
    named = {"foreign": {"source": "ann/m@main", "hub": "ann/m"}, "recipe": {"data": 3}}
    assert publishable(named) == named


PRIVATE = ("hf_abcdefgh12", "ghp_0123456789abcdefABCD", "annabel", "acme", "lab7", "secretword")


def planted():
    """Provenance with a user, a machine, folders and keys in every place that a run fills."""
    home = "/home/annabel"
    data = {"source": f"{home}/acme/texts.txt", "valid": "C:\\Users\\annabel", "tokenizer": home}
    before = {"foreign": {"source": f"{home}/run.ckpt", "owner": "annabel"}, "user": "annabel"}
    return {
        "command": f"didi distill --out {home}/acme", "host": "lab7", "user": "annabel", "step": 5,
        "teacher_source": f"{home}/acme/teacher",
        "recipe": {"data": data, "student": "~annabel/acme/x", "note": "with hf_abcdefgh12"},
        "foreign": {
            "source": "acme/run/last.ckpt", "layout": "lightning", "weights": "ema",
            "tokenizer": f"{home}/words", "environment": {"KEY": "secretword"},
            "notes": ["from https://annabel:secretword@example.org/a", f"see {home}/acme/notes"],
        },
        "finetuned_from": {"source": f"{home}/base", "sha256": "ab", "user": "annabel",
                           "provenance": before},
        "versions": {"torch": "2", "key": "ghp_0123456789abcdefABCD"},
    }  # fmt: skip


def test_nothing_private_is_in_the_card_or_in_what_is_pushed(hub):
    assert not any(word in card(provenance=planted()) for word in PRIVATE)
    make(planted()).push_to_hub("someone/tiny", token="t")
    (texts,) = StandIn.texts
    assert {"README.md", "config.json", "tokenizer.json"} <= texts.keys()
    for name, text in texts.items():
        assert not any(word in text for word in PRIVATE), name
    assert '"layout": "lightning"' in texts["config.json"]


def test_a_licence_is_the_hubs_name(tmp_path):
    with pytest.raises(UserError, match="license is 'Apache 2.0'.*apache-2.0"):
        make().save(tmp_path / "new", license="Apache 2.0")
    assert not (tmp_path / "new").exists()


class StandIn:
    """HfApi without a hub: keeps what it was given."""

    calls: list = []  # noqa: RUF012
    error = None
    readme = None
    """A file: the card that is there already."""
    texts: list = []  # noqa: RUF012
    """What is in the files of each upload that are no weights."""

    def __init__(self, token=None):
        self.calls.append(("token", token))

    def create_repo(self, repo_id, private, exist_ok):
        if self.error:
            raise self.error
        self.calls.append(("create", repo_id, private, exist_ok))
        return f"https://huggingface.co/{repo_id}"

    def file_exists(self, repo_id, filename):
        return filename == "README.md" and self.readme is not None

    def hf_hub_download(self, repo_id, filename):
        return str(self.readme)

    def upload_folder(self, repo_id, folder_path, commit_message):
        model = didi.load(folder_path, device="cpu")
        text = didi_card(folder_path)
        files = [p for p in Path(folder_path).iterdir() if p.suffix != ".safetensors"]
        self.texts.append({path.name: path.read_text() for path in files})
        self.calls.append(("upload", repo_id, model, text))


def didi_card(folder):
    path = Path(folder, "README.md")
    return path.read_text() if path.exists() else None


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", StandIn)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    monkeypatch.setattr(export, "require_network", lambda: None)
    monkeypatch.setattr(StandIn, "calls", [])
    monkeypatch.setattr(StandIn, "texts", [])
    monkeypatch.setattr(StandIn, "error", None)
    return StandIn


def test_pushed_is_what_would_be_saved(hub):
    model = make(PROVENANCE)
    address = model.push_to_hub("ann/tiny", private=True, token="t", license="mit")
    assert address == "https://huggingface.co/ann/tiny"
    (_, token), create, (_, repo, pushed, text) = hub.calls
    assert (token, create, repo) == ("t", ("create", "ann/tiny", True, True), "ann/tiny")
    ours, theirs = model.network.state_dict(), pushed.network.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)
    assert "didi generate ann/tiny" in text
    assert pushed.provenance["recipe"]["data"]["source"] == "texts|one"
    assert model.provenance == PROVENANCE


@pytest.mark.parametrize(("there", "sent"), [("# Mine\n", False), (f"{MARK}\n# Old\n", True)])
def test_a_card_that_someone_wrote_on_the_hub_stays(hub, monkeypatch, tmp_path, there, sent):
    (tmp_path / "README.md").write_text(there)
    monkeypatch.setattr(StandIn, "readme", tmp_path / "README.md")
    make().push_to_hub("ann/tiny", token="t")
    _, _, (_, _, pushed, text) = hub.calls
    assert (text is not None) == sent
    assert pushed.config == CONFIG


def test_nothing_is_sent_without_a_token_or_a_name(hub):
    with pytest.raises(UserError, match="no token to write with: log in with `hf auth login`"):
        make().push_to_hub("ann/tiny")
    with pytest.raises(UserError, match="give `owner/name`"):
        make().push_to_hub("tiny", token="t")
    with pytest.raises(UserError, match="give `owner/name`"):
        make().push_to_hub("../tiny", token="t")
    assert hub.calls == []


def test_no_network_is_one_line(hub, monkeypatch):
    def offline():
        raise ConnectionError("no network: its name cannot be looked up")

    monkeypatch.setattr(export, "require_network", offline)
    with pytest.raises(UserError, match="ann/tiny: uploading failed .no network.*hf upload"):
        make().push_to_hub("ann/tiny", token="t")
    assert hub.calls == []


def test_a_refusal_is_one_line(hub, monkeypatch):
    response = type("Response", (), {"headers": {}, "request": None})()
    refusal = huggingface_hub.errors.HfHubHTTPError("403 Forbidden\nlong story", response=response)
    monkeypatch.setattr(StandIn, "error", refusal)
    with pytest.raises(UserError, match="403 Forbidden.*the token may write there") as caught:
        make().push_to_hub("ann/tiny", token="t")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "odd",
    [7, {}, {"rows": []}, {"rows": [1]}, {"rows": {"a": 1}}, {"rows": [{}], "baseline": [3]},
     {"rows": [{}], "baseline": "x"}],
)  # fmt: skip
def test_numbers_of_another_form_are_refused(tmp_path, odd):
    (tmp_path / "numbers.json").write_text(json.dumps(odd))
    with pytest.raises(UserError, match="holds no rows"):
        read_numbers(tmp_path / "numbers.json")


@pytest.mark.parametrize("value", [None, [], [[1]], {"a": 1}, "a|b\n\n# c", True, 1e300])
def test_values_of_another_form_make_a_table_all_the_same(value):
    row = {"model": "m", "steps": 8, "ppl": 2.5, "ppl_ci95": [2, 3], "num_samples": 4}
    for key in row:
        numbers = {"rows": [row, row | {key: value}, row | {"ppl_ci95": value}], "judge": value}
        text = model_card(
            "x", LoadedModel(build_model(CONFIG), CONFIG), CardOptions(numbers=numbers)
        )
        table = text.split("## Numbers")[1].split("##")[0].strip().splitlines()[2:]
        assert len({re.sub(r"\\\|", "", line).count("|") for line in table}) == 1

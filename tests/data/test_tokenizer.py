"""Tokenizers: what they encode they decode, and a saved one is the same one."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import transformers.dynamic_module_utils
from huggingface_hub import constants

from didi_instruct.data.tokenizer import END_OF_TEXT, Tokenizer, train_tokenizer
from didi_instruct.errors import UserError

GPT2 = Path(__file__).parents[3] / "shared" / "data" / "gpt2_tokenizer"
SAMPLES = [
    "Once upon a time, there was a naïve girl.",
    "  two  spaces\n\n\nthree lines\ttab\r\n",
    "日本語 — ½ 🙂🙂 \u200b zero width",
    "I'll say it's 1234567 o'clock!?!",
    f"before{END_OF_TEXT}after",
    "",
]
WORDS = "the cat sat on the mat and the dog sat on the log " * 20


def test_bytes_are_their_own_ids() -> None:
    tokenizer = Tokenizer.load("bytes")
    assert tokenizer.size == 257
    assert tokenizer.eot_id == 256
    for text in SAMPLES[:4]:
        assert tokenizer.encode([text]) == [list(text.encode())]
        assert tokenizer.decode(text.encode()) == text


def test_learned_tokenizer_gives_back_any_text_in_fewer_tokens() -> None:
    tokenizer = train_tokenizer([WORDS], 300)
    assert 257 < tokenizer.size <= 300
    assert tokenizer.decode_batch(tokenizer.encode(SAMPLES)) == SAMPLES
    assert len(tokenizer.encode([WORDS])[0]) < len(WORDS) / 2
    with pytest.raises(UserError, match="257 or more"):
        train_tokenizer([WORDS], 256)


def test_learning_does_not_depend_on_the_number_of_cores() -> None:
    code = (
        "from didi_instruct.data.tokenizer import train_tokenizer\n"
        "texts = [' '.join(f'w{i * j % 97} x{i % 13}' for j in range(50)) for i in range(200)]\n"
        "import sys; sys.stdout.write(train_tokenizer(texts, 500).hash)"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"RAYON_NUM_THREADS": threads, "PATH": ""},
            check=True,
            capture_output=True,
        ).stdout
        for threads in ("1", "4")
    }
    assert len(hashes) == 1


def test_saving_keeps_ids_hash_and_end_of_text(tmp_path: Path) -> None:
    words = Tokenizer.from_words(["a", "b", "stop"], eot="stop")
    for number, tokenizer in enumerate(
        [words, Tokenizer.load("bytes"), train_tokenizer([WORDS], 280)]
    ):
        folder = tmp_path / str(number)
        tokenizer.save(folder)
        for source in (folder, str(folder), folder / "tokenizer.json"):
            loaded = Tokenizer.load(source)
            assert loaded.hash == tokenizer.hash
            assert (loaded.size, loaded.eot_id) == (tokenizer.size, tokenizer.eot_id)
    assert words.hash != tokenizer.hash


def test_transformers_reads_a_saved_tokenizer(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([WORDS], 280)
    tokenizer.save(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.eos_token_id == tokenizer.eot_id
    assert loaded(SAMPLES[0])["input_ids"] == tokenizer.encode(SAMPLES)[0]


def test_truncation_and_padding_of_a_foreign_file_are_ignored(tmp_path: Path) -> None:
    Tokenizer.load("bytes").save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    (tmp_path / "other.json").write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path / "other.json").encode(["longer"]) == [list(b"longer")]


def test_words_are_split_and_joined_at_spaces() -> None:
    tokenizer = Tokenizer.from_words(["the", "cat", "sat"])
    assert tokenizer.encode(["the cat  sat\nsat"]) == [[0, 1, 2, 2]]
    assert tokenizer.decode([0, 1, 2, 2]) == "the cat sat sat"
    assert tokenizer.size == 3
    assert tokenizer.eot_id is None
    with pytest.raises(UserError, match="cannot encode"):
        tokenizer.encode(["the dog"])
    with pytest.raises(UserError, match="'big cat' is not a word"):
        Tokenizer.from_words(["big cat"])
    with pytest.raises(UserError, match="differ"):
        Tokenizer.from_words(["a", "a"])


def test_decoding_takes_tensors_and_can_stop_at_the_end_of_text() -> None:
    tokenizer = Tokenizer.load("bytes")
    ids = [104, 105, 256, 33, 256]
    for form in (ids, tuple(ids), np.array(ids, np.uint16), torch.tensor(ids)):
        assert tokenizer.decode(form) == f"hi{END_OF_TEXT}!{END_OF_TEXT}"
        assert tokenizer.decode(form, stop_at_eot=True) == "hi"
    rows = torch.tensor([ids, [97] * 5])
    assert tokenizer.decode_batch(rows, stop_at_eot=True) == ["hi", "aaaaa"]


@pytest.mark.parametrize("eot", [END_OF_TEXT, "</s>", "<eos>", "[SEP]"])
def test_the_usual_end_of_text_tokens_are_found(eot: str) -> None:
    assert Tokenizer.from_words(["a", eot, "b"]).eot_id == 1


def test_an_end_of_text_token_can_be_named() -> None:
    assert Tokenizer.load("bytes", eot="A").eot_id == 65
    with pytest.raises(UserError, match="no token `<stop>`"):
        Tokenizer.load("bytes", eot="<stop>")


def test_what_is_no_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"tokenizer.json: not a tokenizer.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(UserError, match=r"empty: has neither tokenizer.json nor vocab.json"):
        Tokenizer.load(tmp_path / "empty")
    with pytest.raises(UserError, match=r"gone: no such tokenizer"):
        Tokenizer.load(str(tmp_path / "gone"))
    with pytest.raises(UserError, match="didi data prepare"):
        Tokenizer.load("bpe:500")


def test_a_name_that_cannot_be_downloaded_suggests_a_directory(monkeypatch) -> None:
    def offline(name: str, **_: object) -> None:
        raise OSError("We couldn't connect to the hub.\nCheck your connection.")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", offline)
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [])
    with pytest.raises(
        UserError, match=r"`user/name`.*couldn't connect.*local directory"
    ) as caught:
        Tokenizer.load("user/name")
    assert "\n" not in str(caught.value)


def test_without_a_network_it_says_so_at_once(monkeypatch) -> None:
    def unknown(host: str, port: None) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    monkeypatch.delenv("https_proxy", raising=False)
    with pytest.raises(UserError, match="`user/no-such-name`.*no network"):
        Tokenizer.load("user/no-such-name")


def test_a_downloaded_tokenizer_keeps_its_end_of_text(tmp_path: Path, monkeypatch) -> None:
    words = Tokenizer.from_words(["a", "fin", "</s>"], eot="fin")
    words.save(tmp_path)
    real = transformers.AutoTokenizer.from_pretrained
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda name, **_: real(tmp_path)
    )
    assert Tokenizer.load("user/name").eot_id == 1


@pytest.mark.parametrize("beside", ["tokenizer_config.json", "config.json"])
def test_code_beside_a_tokenizer_is_neither_run_nor_asked_about(
    tmp_path: Path, monkeypatch, beside: str
) -> None:
    """A repository in the hub's cache whose code would leave a file; nobody is asked for leave."""
    home, revision, canary = tmp_path / "models--user--name", "0" * 40, tmp_path / "canary"
    folder = home / "snapshots" / revision
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(revision)
    folder.mkdir(parents=True)
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass Evil: pass\n")
    code = {"auto_map": {"AutoTokenizer": ["evil.Evil", None], "AutoConfig": "evil.Evil"}}
    content = {"model_type": "evil", "tokenizer_class": "Evil", **code}
    (folder / beside).write_text(json.dumps(content))
    modules = transformers.dynamic_module_utils
    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": asked.append(question) or "y")
    with pytest.raises(UserError, match="`user/name`"):
        Tokenizer.load("user/name")
    assert not asked
    assert not canary.exists()


@pytest.mark.skipif(
    not GPT2.is_dir(), reason="needs GPT-2's vocab.json and merges.txt beside the repository"
)
def test_gpt2_files_give_the_tokens_of_transformers() -> None:
    tokenizer = Tokenizer.load(GPT2)
    reference = transformers.GPT2Tokenizer.from_pretrained(GPT2)
    assert tokenizer.size == len(reference) == 50257
    assert tokenizer.eot_id == reference.eos_token_id == 50256
    assert tokenizer.encode(SAMPLES) == [reference(text)["input_ids"] for text in SAMPLES]
    assert tokenizer.decode_batch(tokenizer.encode(SAMPLES)) == SAMPLES

"""Text to token ids and back: one wrapper around the `tokenizers` library, and how to load one."""

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from didi_instruct.data.files import write_atomic
from didi_instruct.data.hub import quiet, require_network
from didi_instruct.errors import UserError, first_line

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
"""The letters that a model of proteins draws."""

ESM_VOCABULARY = (
    *("<cls>", "<pad>", "<eos>", "<unk>"),
    *"LAGVSERTIDPKQNFYMHWCXBUZO.-",
    *("<null_1>", "<mask>"),
)
"""The 33 tokens of ESM-2 and DPLM, in the order of their ids. Beside the 20 amino acids stand
selenocysteine (U), pyrrolysine (O), letters for residues that are not known (X any, B and Z one of
two) and signs of alignments."""

END_OF_TEXT = "<|endoftext|>"
"""End-of-text token of GPT-2 and of the tokenizers made here."""

_EOT_CANDIDATES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>", "[SEP]")
_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"


class Tokenizer:
    """A tokenizer whose ids are the model's: nothing is added, cut off or padded.

    `eot` is the token that ends a text: by default the first known one that the vocabulary has,
    and None where it has none of them.
    """

    def __init__(self, backend: Backend, eot: str | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if eot is not None and eot not in vocabulary:
            raise UserError(f"The tokenizer has no token `{eot}` to end a text with.")
        candidates = _EOT_CANDIDATES if eot is None else (eot,)
        self.eot: str | None = next((token for token in candidates if token in vocabulary), None)
        self.eot_id: int | None = None if self.eot is None else vocabulary[self.eot]
        self.size: int = max(vocabulary.values(), default=-1) + 1

    def __repr__(self) -> str:
        return f"Tokenizer(size={self.size}, eot={self.eot!r}, hash={self.hash[:12]})"

    @classmethod
    def load(cls, source: str | Path, eot: str | None = None) -> "Tokenizer":
        """Load what `source` names; `eot` is the token that ends a text, if it is unusual.

        A source is `bytes`, `esm` (proteins), a tokenizer.json, a folder with one (a model,
        prepared data), with GPT-2's vocab.json and merges.txt or with ESM's vocab.txt, or a Hugging
        Face id.
        """
        if str(source) == "bytes":
            return cls(_byte_backend(), eot)
        if str(source) == "esm":
            return cls(_esm_backend(ESM_VOCABULARY), eot)
        if str(source).startswith("bpe:"):
            raise UserError(f"`{source}` is trained on a corpus: only `didi data prepare` can.")
        path = Path(source)
        if path.is_dir():
            return _load_folder(path, eot)
        if path.is_file():
            return _load_json(path, eot)
        if isinstance(source, Path) or _looks_like_a_path(source):
            raise UserError(f"{source}: no such tokenizer file or folder.")
        return _load_from_hub(source, eot)

    @classmethod
    def from_words(cls, words: Sequence[str], eot: str | None = None) -> "Tokenizer":
        """Token i is `words[i]`; a text is words with white space between them."""
        odd = next((word for word in words if word.split() != [word]), None)
        if odd is not None:
            raise UserError(f"{odd!r} is not a word: white space separates words.")
        vocabulary = {word: index for index, word in enumerate(words)}
        if len(vocabulary) != len(words):
            raise UserError("The words of a tokenizer must differ from each other.")
        backend = Backend(models.WordLevel(vocabulary))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return cls(backend, eot)  # without a decoder, the library joins tokens with spaces

    @classmethod
    def from_transformers(cls, loaded: Any, name: str, eot: str | None = None) -> "Tokenizer":
        """Take over a tokenizer of `transformers`; `name` is what an error calls it."""
        backend = getattr(loaded, "backend_tokenizer", None)
        if backend is None:
            raise UserError(
                f"Tokenizer `{name}` has no tokenizer.json form: convert it to one first."
            )
        if eot is None and backend.token_to_id(loaded.eos_token or "") is not None:
            eot = loaded.eos_token
        return cls(Backend.from_str(backend.to_str()), eot)

    def ending(self, eot_id: int) -> "Tokenizer":
        """Return it for a model whose texts end with a token of its vocabulary."""
        token = next(word for word, index in self.vocabulary.items() if index == eot_id)
        return Tokenizer(Backend.from_str(self._backend.to_str()), token)

    def endless(self) -> "Tokenizer":
        """Return it for a model whose texts fill their window: no token of theirs ends one."""
        twin = Tokenizer(Backend.from_str(self._backend.to_str()), self.eot)
        twin.eot = twin.eot_id = None
        return twin

    @functools.cached_property
    def vocabulary(self) -> dict[str, int]:
        """Id of every token."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def special_ids(self) -> set[int]:
        """Ids of the tokens that are marked as no part of a text."""
        added = self._backend.get_added_tokens_decoder()
        return {index for index, token in added.items() if token.special}

    def frame(self, token: str) -> tuple[list[int], list[int]]:
        """Ids that its own library would put before and after a text; `token` is any special one.

        `encode` never adds them.
        """
        ids: list[int] = self._backend.encode(token, add_special_tokens=True).ids
        place = ids.index(self.vocabulary[token])
        return ids[:place], ids[place + 1 :]

    @functools.cached_property
    def hash(self) -> str:
        """SHA-256 of the tokenizer's canonical JSON: the same after saving and loading."""
        content = json.loads(self._backend.to_str())
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def __contains__(self, word: str) -> bool:
        """Return True if the word is one token."""
        return self._backend.token_to_id(word) is not None

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, on all cores. Special tokens are read where written, never added."""
        try:
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises nothing more precise
            raise UserError(f"The tokenizer cannot encode this text: {error}") from error
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int], stop_at_eot: bool = False) -> str:
        """Return the text of `ids` (also a tensor or an array), special tokens written out."""
        return self.decode_batch([ids], stop_at_eot)[0]

    def decode_batch(self, rows: Iterable[Iterable[int]], stop_at_eot: bool = False) -> list[str]:
        """Return the text of each row; with `stop_at_eot`, up to its first end-of-text token."""
        plain = [_plain(row) for row in rows]
        if stop_at_eot and self.eot_id is not None:
            plain = [row[: row.index(self.eot_id)] if self.eot_id in row else row for row in plain]
        texts: list[str] = self._backend.decode_batch(plain, skip_special_tokens=False)
        return texts

    def files(self) -> dict[str, bytes]:
        """Content of tokenizer_config.json, which Transformers reads too, and of tokenizer.json."""
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        if self.eot is not None:
            config["eos_token"] = self.eot
        encoded = (json.dumps(config, indent=2) + "\n").encode()
        return {_CONFIG_FILE: encoded, _FILE: self._backend.to_str().encode()}

    @classmethod
    def from_files(cls, paths: Mapping[str, Path], eot: str | None = None) -> "Tokenizer":
        """Read what `save` wrote; `paths` says where each file is."""
        path = paths[_FILE]
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises nothing more precise
            raise UserError(f"{path}: not a tokenizer.json ({error}).") from error
        if eot is None and _CONFIG_FILE in paths:
            configured = _configured_eot(paths[_CONFIG_FILE])
            if configured is not None and backend.token_to_id(configured) is not None:
                eot = configured
        return cls(backend, eot)

    def save(self, folder: Path) -> None:
        """Write its files into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            write_atomic(folder / name, content)


def train_tokenizer(documents: Iterable[str], size: int) -> Tokenizer:
    """Learn a byte-level BPE of at most `size` ids, the 256 bytes and end-of-text among them.

    The same documents give the same tokenizer, whatever the number of cores. A small corpus may
    have too few pairs that occur twice to fill `size`.
    """
    if size < 257:
        raise UserError(f"bpe:{size} is too small: 256 bytes and {END_OF_TEXT} need 257 or more.")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(documents, trainer)
    return Tokenizer(backend, END_OF_TEXT)


def _byte_backend() -> Backend:
    """Id b is byte b; id 256 ends a text."""
    # Byte-level models write each byte as one printable character. The library has the set but
    # not the order: printable bytes stand for themselves, the others take code points from 256.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    return backend


def _gpt2_backend(vocabulary: Path, merges: Path) -> Backend:
    """GPT-2's form: a vocabulary, a list of merges, and its end-of-text token."""
    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # the library raises nothing more precise
        raise UserError(f"{vocabulary.parent}: not a GPT-2 tokenizer ({error}).") from error
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    return backend


def _esm_words(vocabulary: Path) -> list[str]:
    """Return the tokens of an ESM vocabulary, one per line; nothing if it is none."""
    if not vocabulary.is_file():
        return []
    try:
        text = vocabulary.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{vocabulary}: cannot be read ({error}).") from error
    words = [line.strip() for line in text.splitlines()]
    return words if {"<cls>", "<unk>", "<eos>"} <= set(words) else []


def _esm_backend(words: Sequence[str]) -> Backend:
    """ESM's form, which has no tokenizer.json: residues stand side by side, without spaces.

    What lies between known letters is one unknown token, as in ESM's own.
    """
    special = [word for word in words if re.fullmatch("<.+>", word)]
    # The longest first, else in one order: the hash of a tokenizer has a part in what fits it.
    letters = sorted(set(words) - set(special) - {""}, key=lambda word: (-len(word), word))
    backend = Backend(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Split(Regex("|".join(map(re.escape, letters))), "isolated"),
        ]
    )
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(special)
    backend.post_processor = processors.TemplateProcessing(
        single="<cls> $A <eos>",
        special_tokens=[(word, words.index(word)) for word in ("<cls>", "<eos>")],
    )
    return backend


def _load_json(path: Path, eot: str | None) -> Tokenizer:
    paths = {_FILE: path}
    config = path.with_name(_CONFIG_FILE)
    if path.name == _FILE and config.is_file():  # under another name it may be another tokenizer
        paths[_CONFIG_FILE] = config
    return Tokenizer.from_files(paths, eot)


def _load_folder(folder: Path, eot: str | None) -> Tokenizer:
    if (folder / _FILE).is_file():
        return _load_json(folder / _FILE, eot)
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    if vocabulary.is_file() and merges.is_file():
        return Tokenizer(_gpt2_backend(vocabulary, merges), eot)
    words = _esm_words(folder / "vocab.txt")
    if words:
        return Tokenizer(_esm_backend(words), eot)
    raise UserError(
        f"{folder}: has neither {_FILE} nor vocab.json and merges.txt, nor ESM's vocab.txt."
    )


def _configured_eot(config: Path) -> str | None:
    """Return the end-of-text token that a tokenizer_config.json names, if it does."""
    try:
        token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{config}: not a JSON object ({error}).") from error
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _plain(ids: Any) -> list[int]:
    """Turn a tensor or an array into a list at once, which is faster than token by token."""
    return ids.tolist() if hasattr(ids, "tolist") else list(ids)


def _looks_like_a_path(source: str) -> bool:
    """Tell a path that is not there from a Hugging Face id, which is `name` or `user/name`."""
    return source.startswith((".", "/", "~")) or source.endswith(".json") or source.count("/") > 1


def _load_from_hub(name: str, eot: str | None) -> Tokenizer:
    import transformers

    # Left unsaid, the library asks on the terminal whether to run a repository's code.
    read = functools.partial(
        transformers.AutoTokenizer.from_pretrained, name, trust_remote_code=False
    )
    try:
        with quiet("huggingface_hub"):
            try:  # what was downloaded before needs no network
                loaded = read(local_files_only=True)
            except (OSError, ValueError):
                require_network()
                loaded = read()
    except Exception as error:  # a network, a repository and a file format can fail in any way
        reason = first_line(error)
        raise UserError(
            f"Tokenizer `{name}` is no local file or folder, and loading it from Hugging Face "
            f"failed ({reason}). Give a local directory that has its tokenizer.json."
        ) from error
    return Tokenizer.from_transformers(loaded, name, eot)


def is_protein(vocabulary: Mapping[str, int]) -> bool:
    """Return True if the texts of a vocabulary are chains of residues, a letter each."""
    letters = {word for word in vocabulary if len(word) == 1}
    pieces = any(len(word) > 1 and word[0] not in "<[" for word in vocabulary)
    text = any(letter.islower() for letter in letters)
    return letters >= set(AMINO_ACIDS) and not pieces and not text


def amino_ids(vocabulary: Mapping[str, int]) -> set[int]:
    """Ids of the 20 amino acids."""
    return {vocabulary[letter] for letter in AMINO_ACIDS}


def residues_of(vocabulary: Mapping[str, int]) -> str:
    """Letters that a chain may have in a vocabulary of residues; nothing for any other."""
    if not is_protein(vocabulary):
        return ""
    return "".join(sorted(word for word in vocabulary if len(word) == 1 and word.isalpha()))


def check_residues(text: str, vocabulary: Mapping[str, int]) -> None:
    """Refuse letters that are no residues: a tokenizer would take them for unknown ones."""
    for number, letter in enumerate("".join(text.split()), 1):
        if not (letter.isalpha() and letter in vocabulary):
            given = text if len(text) <= 40 else f"{text[:40]}…"
            capital = " Residues are capital letters." if letter.islower() else ""
            raise UserError(
                f"`{letter}`, letter {number} of the given `{given}`, is no residue: use the 20 "
                f"amino acids, or X for any.{capital}"
            )

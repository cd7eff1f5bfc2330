"""Judging texts with a causal language model of `transformers`: a folder, a hub id, a GGUF file."""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import MissingExtraError, UserError, first_line
from didi_instruct.evaluation.cache import digest
from didi_instruct.evaluation.samples import SampleSet
from didi_instruct.evaluation.scores import (
    Ends,
    JudgeConfig,
    Progress,
    Scores,
    checked,
    display_name,
    temperature_setting,
)
from didi_instruct.hub.sources import ModelInfo
from didi_instruct.models.checkpoint import CONFIG

LOGITS_BYTES = 1 << 30
"""Logits that a network may return at once; batches are cut to fit."""
SOFTMAX_ENTRIES = 1 << 25
"""Logits that are cast to float32 at once."""


class CausalJudge:
    """Any causal language model of `transformers`.

    Texts are tokenised anew, without anything added, and read up to `max_length` tokens. The first
    token is scored only after a start token.
    """

    exact = False  # another tokenizer, and perhaps not the whole text
    bound = False
    reads_texts = True

    def __init__(
        self,
        source: str | Path,
        config: JudgeConfig | None = None,
        *,
        device: torch.device | str = "cpu",
        name: str | None = None,
    ) -> None:
        config, name = config or JudgeConfig(), name or str(source)
        self.config, self.device = config, torch.device(device)
        self.batch_size = config.batch_size or default_batch(self.device)
        # In half precision the same weights give other numbers, and a judge is read to the digit.
        files, self.tokenizer, self.model = load_causal(
            source, torch.float32, config.trust_remote_code
        )
        self.model.to(self.device).eval()
        require_causal(name, self.model)
        settings = self.model.config.get_text_config()
        self.vocabulary: int = settings.vocab_size
        self.start = _start_token(name, self.tokenizer, config.bos)
        self.max_length = _max_length(name, config.max_length, _context(settings, self.tokenizer))
        self.end = _end_token(name, self.tokenizer, config.end, self.vocabulary)
        unusual = self.end not in (None, self.tokenizer.eos_token_id)
        uniform = config.beyond == "uniform"
        self.name = display_name(
            name,
            temperature_setting(config.temperature),
            "spaces collapsed" if config.collapse_spaces else None,
            f"end {self.tokenizer.convert_ids_to_tokens(self.end)}" if unusual else None,
            f"uniform after {self.max_length} tokens" if uniform else None,
        )
        self.fingerprint = digest(
            self.start,
            self.max_length,
            config.temperature,
            config.collapse_spaces,
            self.end,
            config.beyond,
            str(self.model.dtype).encode(),
            *map(file_hash, files),
        )

    @property
    def ends(self) -> Ends:
        """Ends are priced apart where there is a token for them."""
        return "unknown" if self.end is None else "apart"

    def check(self, model: ModelInfo) -> None:
        """Refuse nothing: texts of any model can be read."""

    def score(self, samples: SampleSet, progress: Progress | None = None) -> Scores:
        """Score the texts and, with a token for that, the same texts with their ends, in one pass.

        An end that lies beyond the context is not read; then the text costs all that was read.
        """
        texts = self._encode(samples.texts)
        if self.end is None:
            return checked(self.name, self._priced(texts, self._nats(texts, progress).total))
        ends = (samples.lengths < samples.tokens.shape[1]).tolist()
        ended = [ids + [self.end] * end for ids, end in zip(texts, ends, strict=True)]
        nats = self._nats(ended, progress)
        read = [self._row(plain) != self._row(ids) for plain, ids in zip(texts, ended, strict=True)]
        without = torch.where(torch.tensor(read), nats.before, nats.total)
        found = self._priced(texts, without, self._priced(ended, nats.total))
        return checked(self.name, found)

    def _row(self, ids: list[int]) -> list[int]:
        """The part of a text that is read, after the start token."""
        return ([] if self.start is None else [self.start]) + ids[: self.max_length]

    def _nats(self, texts: Sequence[list[int]], progress: Progress | None) -> "Nats":
        return causal_nats(
            lambda ids, real: self.model(ids, attention_mask=real, use_cache=False).logits,
            [self._row(ids) for ids in texts],
            num_tokens=self.vocabulary,
            temperature=self.config.temperature,
            batch_size=self.batch_size,
            device=self.device,
            progress=progress,
        )

    def _priced(
        self, texts: Sequence[list[int]], nats: Tensor, ended: Scores | None = None
    ) -> Scores:
        """Scores from the nats of what was read, with the price of what was not."""
        rows = [self._row(ids) for ids in texts]
        tokens = torch.tensor([max(len(row) - 1, 0) for row in rows])
        unread = torch.tensor([max(0, len(ids) - (self.max_length or len(ids))) for ids in texts])
        if self.config.beyond == "uniform":
            nats, tokens = nats + unread * math.log(self.vocabulary), tokens + unread
            unread = torch.zeros_like(unread)
        return Scores(nats, tokens, int((unread > 0).sum()), ended)

    @torch.no_grad()
    def features(self, texts: Sequence[str], max_tokens: int = 256) -> NDArray[np.float32]:
        """Last hidden state at the last of the first `max_tokens` tokens of each text: (N, d)."""
        start = [] if self.start is None else [self.start]
        rows = [(start + ids[:max_tokens])[: self.max_length] for ids in self._encode(texts)]
        if not all(rows):
            raise UserError(
                f"Text {rows.index([])} has no tokens, hence no features: leave it out."
            )
        trunk, found = self.model.base_model, [torch.empty(0)] * len(rows)
        for chunk in batches(rows, lambda _: self.batch_size):
            ids, real = pad([rows[i] for i in chunk], self.device)
            hidden = trunk(ids, attention_mask=real, use_cache=False).last_hidden_state
            last = hidden[torch.arange(len(chunk), device=hidden.device), real.sum(1) - 1]
            for i, vector in zip(chunk, last.float().cpu(), strict=True):
                found[i] = vector
        return torch.stack(found).numpy()

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, nothing added."""
        if not texts:
            raise UserError("There are no texts to judge.")
        if self.config.collapse_spaces:
            texts = [re.sub(" +", " ", text) for text in texts]
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        ids: list[list[int]] = self.tokenizer(list(texts), **options)["input_ids"]
        known = self.model.get_input_embeddings().num_embeddings
        if max((max(row, default=0) for row in ids), default=0) >= known:
            raise UserError(
                f"{self.name}: its tokenizer has ids that its model does not know "
                f"({known} are known): the two do not belong together."
            )
        return ids


def default_batch(device: torch.device) -> int:
    """Texts that a judge reads at once: a GPU has to be given enough to do, and few launches."""
    return 64 if device.type == "cuda" else 16


def _start_token(name: str, tokenizer: Any, bos: str) -> int | None:
    """Id to put before every text, if any."""
    token: int | None = tokenizer.bos_token_id
    if bos == "never":
        return None
    if bos == "always":
        if token is None:
            raise UserError(f"The judge {name} has no start token: use bos `auto` or `never`.")
        return token
    plain, full = (tokenizer("a", add_special_tokens=a)["input_ids"] for a in (False, True))
    return token if full[:1] == [token] and plain[:1] != [token] else None


def _end_token(name: str, tokenizer: Any, end: str | int | None, known: int) -> int | None:
    """Id of the token that ends a text: the one asked for, or the tokenizer's; None if neither.

    A tokenizer may name one that its model does not know.
    """
    if end is None:
        usual: int | None = tokenizer.eos_token_id
        return usual if usual is not None and usual < known else None
    if isinstance(end, str) and not end.isdecimal():
        found: int | None = tokenizer.get_vocab().get(end)
    else:
        found = int(end)
    if found is None or not 0 <= found < known:
        raise UserError(
            f"The judge {name} has no token `{end}` to end a text with: use one of its tokens, or "
            f"an id of 0..{known - 1}."
        )
    return found


def _context(config: Any, tokenizer: Any) -> int | None:
    """Tokens that a model reads at most; None if its files do not say."""
    for name in ("max_position_embeddings", "n_positions"):
        limit = getattr(config, name, None)  # configurations of transformers differ in this name
        if isinstance(limit, int) and limit > 0:
            return limit
    limit = tokenizer.model_max_length
    return limit if limit < 1 << 31 else None  # without a limit of its own it says 10^30


def _max_length(name: str, wanted: int | None, context: int | None) -> int | None:
    if wanted is not None and context is not None and wanted > context:
        raise UserError(
            f"The judge's max_length is {wanted}, but {name} reads {context} tokens: use less."
        )
    return context if wanted is None else wanted


# -log p of rows of tokens, in batches that fit into memory


class Nats(NamedTuple):
    """-log p of each row given its first id, (N,) float64 each."""

    before: Tensor
    """Of all ids but the last."""
    last: Tensor
    """Of the last one, 0 for rows of one id or none."""

    @property
    def total(self) -> Tensor:
        """Nats of whole rows."""
        return self.before + self.last


@torch.no_grad()
def causal_nats(
    logits: Callable[[Tensor, Tensor], Tensor],
    rows: Sequence[list[int]],
    *,
    num_tokens: int,
    temperature: float = 1.0,
    batch_size: int = 16,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Nats:
    """-log p of each row of ids given its first one, summed over tokens, that of the last apart.

    `logits` maps ids and which of them are real, both (B, L), padded on the right, to logits
    (B, L, V) of the next token. Rows of like length go together; neither their order nor the batch
    size changes a result.
    """
    nats = torch.zeros(len(rows), 2, dtype=torch.float64)
    entry = 2 if torch.device(device).type == "cuda" else 4
    done = sum(len(row) < 2 for row in rows)

    def rows_at_once(length: int) -> int:
        return max(1, min(batch_size, LOGITS_BYTES // (length * num_tokens * entry)))

    for chunk in batches(rows, rows_at_once, shortest=2):
        ids, real = pad([rows[i][:-1] for i in chunk], device)
        targets, _ = pad([rows[i][1:] for i in chunk], device)
        next_token, wanted = logits(ids, real).flatten(0, 1), targets.flatten()
        where = real.flatten().nonzero().squeeze(1)
        length, last = ids.shape[1], real.sum(1) - 1
        total = torch.zeros(2 * len(chunk), dtype=torch.float64, device=device)
        for part in torch.split(where, max(1, SOFTMAX_ENTRIES // num_tokens)):
            scaled = next_token[part].float() / temperature
            nll = F.cross_entropy(scaled, wanted[part], reduction="none")
            row = part // length
            total.index_add_(0, 2 * row + (part % length == last[row]), nll.double())
        nats[chunk] = total.view(-1, 2).cpu()
        done += len(chunk)
        if progress is not None:
            progress(done, len(rows))
    return Nats(*nats.unbind(1))


def batches(
    rows: Sequence[Sequence[int]], size: Callable[[int], int], shortest: int = 1
) -> Iterator[list[int]]:
    """Indices of the rows, longest first, so that what does not fit into memory fails at once."""
    kept = [i for i, row in enumerate(rows) if len(row) >= shortest]
    order = sorted(kept, key=lambda i: -len(rows[i]))
    while order:
        count = size(len(rows[order[0]]))
        yield order[:count]
        order = order[count:]


def pad(rows: Sequence[list[int]], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Rows in one tensor, filled up with 0 on the right, and where they are real: both (B, L)."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    real = torch.arange(longest) < torch.tensor([len(row) for row in rows])[:, None]
    return ids.to(device), real.long().to(device)


# Reading models of transformers


def load_causal(
    source: str | Path, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[list[Path], Any, Any]:
    """Return the files that its scores depend on, its tokenizer, and the model."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise UserError(
            f"The judge {source} is read with transformers, which is missing or broken "
            f"({first_line(error)}): pip install --upgrade transformers."
        ) from error
    where, gguf = _locate(source, trust_remote_code)
    options = {"trust_remote_code": trust_remote_code, **gguf}
    try:
        tokenizer = _from_pretrained(AutoTokenizer, where, options)
        special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
        if special.issuperset(tokenizer.get_vocab().values()):  # made up by transformers
            raise ValueError("there are no files of one")
    except Exception as error:  # files of every age and origin can fail in any way
        raise UserError(
            f"The judge {source} has no tokenizer that can be read ({first_line(error)}): put its "
            "tokenizer.json beside its weights."
        ) from error
    options |= {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
    try:
        model, found = _from_pretrained(AutoModelForCausalLM, where, options)
    except Exception as error:
        raise UserError(
            f"The judge {source} cannot be loaded ({first_line(error)}). It must be a causal "
            "language model of transformers with its weights in safetensors, not pickled."
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise UserError(f"The judge {source} is incomplete: its weights lack `{missing[0]}`.")
    return [Path(source)] if gguf else _defining_files(where), tokenizer, model


def _locate(source: str | Path, trust_remote_code: bool) -> tuple[str, dict[str, str]]:
    """Directory or hub id, and the name of the file in it where that is GGUF."""
    path = Path(source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"{path}: no such file.")
        if find_spec("gguf") is None or find_spec("accelerate") is None:
            raise MissingExtraError("A judge in a GGUF file", "eval")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise UserError(f"{path} is not a model folder: it has no {CONFIG}.")
    elif str(source).startswith((".", "/", "~")):
        raise UserError(f"{source}: no such folder.")
    elif not trust_remote_code:
        Tokenizer.load(str(source))  # which says at once, and clearly, if there is no network
    return str(source), {}


def _defining_files(where: str) -> list[Path]:
    """Files of a directory, or of a hub id that was loaded, on which its scores depend."""
    from transformers.utils.hub import cached_file

    folder = Path(str(cached_file(where, CONFIG, local_files_only=True))).parent
    names = (CONFIG, "tokenizer", "vocab", "merges")
    return [
        path
        for path in sorted(folder.iterdir())
        if path.suffix == ".safetensors" or path.name.startswith(names)
    ]


def _from_pretrained(kind: Any, where: str, options: dict[str, Any]) -> Any:
    """Load silently, and without a network where everything is here."""
    with redirect_stderr(StringIO()):
        try:
            return kind.from_pretrained(where, local_files_only=True, **options)
        except (OSError, ValueError):
            if Path(where).is_dir():
                raise
            return kind.from_pretrained(where, **options)


@torch.no_grad()
def require_causal(name: str, model: Any) -> None:
    """Refuse a model that sees the tokens it should predict: it would call anything probable."""
    ids = torch.zeros(2, 4, dtype=torch.long, device=model.device)
    ids[1, -1] = 1
    one, other = model(ids, use_cache=False).logits[:, :-1].float()
    if float((one - other).abs().max()) > 0.01 * float(one.abs().max()):
        raise UserError(f"The judge {name} looks at later tokens: it is not a causal model.")


def file_hash(path: Path) -> bytes:
    """Hash of a file's name and of all of its content: weights may differ anywhere."""
    with path.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").digest()
    return path.name.encode() + b"/" + content

"""Judges: -log p of samples under another language model, one of ours, or the oracle language.

A judge of texts reads them with its own tokenizer, so it can be asked about any sampler. A judge of
tokens has an opinion on sequences of its own tokens alone.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import MissingExtraError, UserError
from didi_instruct.evaluation.diversity import bootstrap
from didi_instruct.evaluation.likelihood import nats_per_token, perplexity
from didi_instruct.evaluation.samples import SampleSet
from didi_instruct.models.checkpoint import load_model
from didi_instruct.models.manifest import CONFIG, FORMAT, MODEL, read_manifest
from didi_instruct.training.objectives import Batch, make_objective
from didi_instruct.training.world import pick_device

Progress = Callable[[int, int], None]
"""Called with how many samples are done, and of how many."""
Bos = Literal["auto", "always", "never"]

LOGITS_BYTES = 1 << 30
"""Logits that a network may return at once; batches are cut to fit."""
SOFTMAX_ENTRIES = 1 << 25
"""Logits that are cast to float32 at once."""
SAMPLED_BYTES = 1 << 20
"""Read of each file's beginning, middle and end, to tell judges apart."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a judge says of each sample."""

    nats: Tensor
    """(N,) float64: -log p of each sample, summed over its scored tokens."""
    tokens: Tensor
    """(N,) int64: how many tokens that are, the judge's own."""
    cut: int = 0
    """Samples that were longer than what the judge reads: only their beginning is scored."""

    def perplexity(self) -> float:
        """Exponential of the mean over all tokens: a long sample weighs more than a short one."""
        return perplexity(float(self.nats.sum() / self.tokens.sum()))

    def interval(self, seed: int = 0) -> tuple[float, float]:
        """95% bootstrap interval of the perplexity over samples; one sample says nothing."""
        table = torch.stack([self.nats, self.tokens.double()], 1)[self.tokens > 0].numpy()
        if len(table) < 2:
            return 0.0, math.inf
        low, high = bootstrap(table, statistic=_nats_per_token, seed=seed)
        return perplexity(low), perplexity(high)


class Judge(Protocol):
    """Anything that can tell how probable samples are."""

    name: str
    fingerprint: str
    """Tells judges and their settings apart: perplexities of two are not comparable."""
    exact: bool
    """Whether -log p is that of the whole sequence of tokens, as the path KL needs it."""

    def score(self, samples: SampleSet, progress: Progress | None = None) -> Scores:
        """Score each sample."""


class CausalJudge:
    """Any causal language model of `transformers`: a directory, a hub id or a GGUF file.

    Texts are tokenised anew, without anything added, and cut to `max_length` tokens (the model's
    context if None). The first token is scored only after a start token. `bos` decides about that:
    `auto` does what the model's own tokenizer does (Llama has one; GPT-2, as everyone scores with
    it, has none), `always` and `never` override it. `temperature` divides the logits.
    """

    exact = False  # another tokenizer, and perhaps not the whole text

    def __init__(
        self,
        source: str | Path,
        *,
        device: torch.device | str = "cpu",
        batch_size: int = 16,
        max_length: int | None = None,
        bos: Bos = "auto",
        temperature: float = 1.0,
        trust_remote_code: bool = False,
    ) -> None:
        self.name, self.device = str(source), torch.device(device)
        _check_settings(batch_size, temperature)
        self.batch_size, self.temperature = batch_size, temperature
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        files, self.tokenizer, self.model = _load_causal(source, dtype, trust_remote_code)
        self.model.to(self.device).eval()
        _require_causal(self.name, self.model)
        self.start = _start_token(self.name, self.tokenizer, bos)
        context = _context(self.model.config.get_text_config(), self.tokenizer)
        self.max_length = _max_length(self.name, max_length, context)
        settings = (self.start, self.max_length, temperature)
        self.fingerprint = _digest(*settings, *(_sample_file(path) for path in files))

    def score(self, samples: SampleSet, progress: Progress | None = None) -> Scores:
        """Score the texts, each from its first token on (or its second: see the class)."""
        start = [] if self.start is None else [self.start]
        texts = self._encode(samples.texts)
        rows = [start + ids[: self.max_length] for ids in texts]
        nats = causal_nats(
            lambda ids, real: self.model(ids, attention_mask=real, use_cache=False).logits,
            rows,
            num_tokens=self.model.config.get_text_config().vocab_size,
            temperature=self.temperature,
            batch_size=self.batch_size,
            device=self.device,
            progress=progress,
        )
        tokens = torch.tensor([max(len(row) - 1, 0) for row in rows])
        cut = 0
        if self.max_length is not None:
            cut = sum(len(ids) > self.max_length for ids in texts)
        return _checked(self.name, Scores(nats, tokens, cut))

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
        for chunk in _batches(rows, lambda _: self.batch_size):
            ids, real = _pad([rows[i] for i in chunk], self.device)
            hidden = trunk(ids, attention_mask=real, use_cache=False).last_hidden_state
            last = (
                hidden[torch.arange(len(chunk), device=hidden.device), real.sum(1) - 1]
                .float()
                .cpu()
            )
            for i, vector in zip(chunk, last, strict=True):
                found[i] = vector
        return torch.stack(found).numpy()

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, nothing added."""
        if not texts:
            raise UserError("There are no texts to judge.")
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        ids: list[list[int]] = self.tokenizer(list(texts), **options)["input_ids"]
        known = self.model.get_input_embeddings().num_embeddings
        if max((max(row, default=0) for row in ids), default=0) >= known:
            raise UserError(
                f"{self.name}: its tokenizer has ids that its model does not know "
                f"({known} are known): the two do not belong together."
            )
        return ids


class _TokenJudge:
    """What judges of tokens have in common."""

    def __init__(
        self, name: str, fingerprint: str, tokenizer: str | None, num_tokens: int, length: int
    ) -> None:
        self.name, self.fingerprint, self.tokenizer = name, fingerprint, tokenizer
        self.num_tokens, self.length = num_tokens, length

    def _check(self, samples: SampleSet) -> None:
        """Refuse samples that are not sequences of this judge's tokens."""
        theirs, tokens = samples.origin.tokenizer, samples.tokens
        if None not in (theirs, self.tokenizer) and theirs != self.tokenizer:
            raise UserError(
                f"The samples of {samples.origin.model} and the judge {self.name} have different "
                "tokenizers, and this judge reads tokens: use a causal language model as the judge."
            )
        if tokens.shape[1] > self.length:
            raise UserError(
                f"The samples have {tokens.shape[1]} tokens, but the judge {self.name} reads "
                f"{self.length}: draw shorter ones."
            )
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.num_tokens:
            raise UserError(
                f"A sample has a token outside 0..{self.num_tokens - 1}, which the judge "
                f"{self.name} does not know."
            )

    def _check_whole(self, samples: SampleSet) -> None:
        """Refuse texts that end before their window: only the window has a probability here."""
        self._check(samples)
        if bool((samples.lengths < samples.tokens.shape[1]).any()):
            raise UserError(
                f"The judge {self.name} knows the probability of whole windows, but these texts "
                "end before: draw them without until_eot, or use a left-to-right judge."
            )


class OracleJudge(_TokenJudge):
    """The oracle language's own log p."""

    exact = True

    def __init__(self, language: OracleLanguage, batch_size: int = 1024) -> None:
        self.language, self.batch_size = language, batch_size
        tables = (language.prior, language.initial, language.transition, language.emission)
        content = [table.cpu().numpy().tobytes() for table in tables]
        fingerprint = _digest(language.words, language.sentences, *content)
        hash_ = language.tokenizer.hash
        super().__init__("oracle", fingerprint, hash_, language.num_tokens, language.length)

    def score(self, samples: SampleSet, progress: Progress | None = None) -> Scores:
        """Score whole sequences, exactly."""
        self._check_whole(samples)
        count, length = samples.tokens.shape
        if length != self.length:
            raise UserError(f"The oracle's sequences have {self.length} tokens, not {length}.")
        parts = []
        for first in range(0, count, self.batch_size):
            chunk = samples.tokens[first : first + self.batch_size].to(self.language.device)
            parts.append(-self.language.log_prob(chunk).cpu())
            if progress is not None:
                progress(first + len(chunk), count)
        nats = torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)
        return _checked(self.name, Scores(nats, torch.full((count,), length)))


class DiffusionJudge(_TokenJudge):
    """A diffusion model's NELBO, an upper bound of -log p, estimated from `draws` noise levels.

    `loss` is the network's part of the objective, as for `likelihood`. The noise follows the row.
    """

    exact = False

    def __init__(
        self,
        loss: Callable[[Batch], Tensor],
        config: ModelConfig,
        *,
        name: str,
        fingerprint: str,
        tokenizer: str | None = None,
        draws: int = 8,
        batch_size: int = 64,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        fingerprint = _digest(fingerprint, draws, seed)
        super().__init__(name, fingerprint, tokenizer, config.num_tokens, config.length)
        self.loss, self.config, self.device = loss, config, device
        self.draws, self.batch_size, self.seed = draws, batch_size, seed

    def score(self, samples: SampleSet, progress: Progress | None = None) -> Scores:
        """Score whole windows."""
        self._check_whole(samples)
        count, length = samples.tokens.shape
        nats = nats_per_token(
            self.loss,
            self.config,
            lambda start, number: samples.tokens[start : start + number],
            sequences=count,
            draws=self.draws,
            batch_size=self.batch_size,
            seed=self.seed,
            device=self.device,
            progress=None if progress is None else (lambda done: progress(done, count)),
        )
        return _checked(self.name, Scores(length * nats, torch.full((count,), length)))


class ARJudge(_TokenJudge):
    """A left-to-right model of ours: the exact log p of the tokens that count."""

    exact = True

    def __init__(
        self,
        network: nn.Module,
        config: ModelConfig,
        *,
        name: str,
        fingerprint: str,
        tokenizer: str | None = None,
        temperature: float = 1.0,
        batch_size: int = 64,
        device: torch.device | str = "cpu",
    ) -> None:
        _check_settings(batch_size, temperature)
        fingerprint = _digest(fingerprint, temperature)
        super().__init__(name, fingerprint, tokenizer, config.num_tokens, config.length)
        self.network, self.config, self.device = network, config, torch.device(device)
        self.temperature, self.batch_size = temperature, batch_size

    def score(self, samples: SampleSet, progress: Progress | None = None) -> Scores:
        """Score the tokens of each sample that count, from the start symbol on."""
        self._check(samples)
        start = self.config.vocab_size - 1
        pairs = zip(samples.tokens.tolist(), samples.lengths.tolist(), strict=True)
        nats = causal_nats(
            lambda ids, _: self.network(ids),
            [[start, *row[:length]] for row, length in pairs],
            num_tokens=self.num_tokens,
            temperature=self.temperature,
            batch_size=self.batch_size,
            device=self.device,
            progress=progress,
        )
        return _checked(self.name, Scores(nats, samples.lengths.clone()))


def open_judge(
    source: str | Path,
    *,
    device: str | None = None,
    batch_size: int = 16,
    max_length: int | None = None,
    bos: Bos = "auto",
    temperature: float = 1.0,
    draws: int = 8,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> Judge:
    """Return the judge that `source` names.

    `oracle`, a directory written by didi (left-to-right or diffusion), or whatever `CausalJudge`
    reads. `draws` and `seed` are for the noise of a diffusion model's bound.
    """
    chosen, folder = pick_device(device), Path(source)
    if str(source) != "oracle" and not _is_ours(folder):
        return CausalJudge(
            source,
            device=chosen,
            batch_size=batch_size,
            max_length=max_length,
            bos=bos,
            temperature=temperature,
            trust_remote_code=trust_remote_code,
        )
    if (max_length, bos) != (None, "auto"):
        raise UserError(f"max_length and bos are for judges of texts; {source} judges tokens.")
    is_causal = str(source) != "oracle" and read_manifest(folder).model.kind == "ar"
    if temperature != 1 and not is_causal:
        raise UserError(f"The judge {source} has no logits to divide: leave its temperature at 1.")
    if str(source) == "oracle":
        return OracleJudge(OracleLanguage.default().to(chosen))
    manifest, loaded = read_manifest(folder), load_model(folder, device=chosen)
    common: dict[str, Any] = {
        "name": str(source),
        "fingerprint": _digest(manifest.files[MODEL].sha256, asdict(loaded.config)),
        "tokenizer": loaded.tokenizer.hash if loaded.tokenizer else None,
        "batch_size": batch_size,
        "device": chosen,
    }
    if is_causal:
        return ARJudge(loaded.model, loaded.config, temperature=temperature, **common)
    objective = make_objective(loaded.config)
    return DiffusionJudge(
        lambda batch: objective.loss(loaded.model, batch),
        loaded.config,
        draws=draws,
        seed=seed,
        **common,
    )


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
) -> Tensor:
    """-log p of each row of ids given its first one, summed over tokens: (N,), float64.

    `logits` takes ids and which of them are real, both (B, L), padded on the right, to logits
    (B, L, V) of the next token. Rows of like length go together; neither their order nor the batch
    size changes a result.
    """
    nats = torch.zeros(len(rows), dtype=torch.float64)
    entry = 2 if torch.device(device).type == "cuda" else 4
    done = sum(len(row) < 2 for row in rows)
    size = _rows_at_once(batch_size, num_tokens * entry)
    for chunk in _batches(rows, size, shortest=2):
        ids, real = _pad([rows[i][:-1] for i in chunk], device)
        targets, _ = _pad([rows[i][1:] for i in chunk], device)
        next_token, wanted = logits(ids, real).flatten(0, 1), targets.flatten()
        where = real.flatten().nonzero().squeeze(1)
        total = torch.zeros(len(chunk), dtype=torch.float64, device=device)
        for part in torch.split(where, max(1, SOFTMAX_ENTRIES // num_tokens)):
            scaled = next_token[part].float() / temperature
            nll = F.cross_entropy(scaled, wanted[part], reduction="none")
            total.index_add_(0, part // ids.shape[1], nll.double())
        nats[chunk] = total.cpu()
        done += len(chunk)
        if progress is not None:
            progress(done, len(rows))
    return nats


def _rows_at_once(batch_size: int, bytes_per_token: int) -> Callable[[int], int]:
    """How many rows of a length to read together."""
    return lambda length: max(1, min(batch_size, LOGITS_BYTES // (length * bytes_per_token)))


def _batches(
    rows: Sequence[Sequence[int]], size: Callable[[int], int], shortest: int = 1
) -> Iterator[list[int]]:
    """Indices of the rows, longest first: what does not fit into memory fails at once."""
    kept = [i for i, row in enumerate(rows) if len(row) >= shortest]
    order = sorted(kept, key=lambda i: -len(rows[i]))
    while order:
        count = size(len(rows[order[0]]))
        yield order[:count]
        order = order[count:]


def _pad(rows: Sequence[list[int]], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Rows in one tensor, filled up with 0 on the right, and where they are real: both (B, L)."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    real = torch.arange(longest) < torch.tensor([len(row) for row in rows])[:, None]
    return ids.to(device), real.long().to(device)


def _checked(name: str, scores: Scores) -> Scores:
    """Refuse scores that mean nothing."""
    if bool(scores.nats.isnan().any()):
        raise UserError(f"The judge {name} answers with NaN: its weights are damaged.")
    if int(scores.tokens.sum()) == 0:
        raise UserError(
            "All samples are empty, or too short for this judge: nothing can be scored."
        )
    return scores


def _nats_per_token(table: NDArray[np.float64]) -> float:
    nats, tokens = table.sum(0)
    return float(nats / tokens)


def _digest(*parts: object) -> str:
    """Hash of values, bytes as they are."""
    digest = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:16]


def _check_settings(batch_size: int, temperature: float) -> None:
    if batch_size < 1:
        raise UserError(f"The judge's batch_size is {batch_size}: use 1 or more.")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise UserError(f"The judge's temperature is {temperature}: use more than 0.")


def _is_ours(folder: Path) -> bool:
    """Whether a directory was written by didi, finished or not."""
    config = folder / CONFIG
    if not config.is_file():
        return (folder / "checkpoints").is_dir()
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def _load_causal(
    source: str | Path, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[list[Path], Any, Any]:
    """Return the files that tell the model from others, its tokenizer, and itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, gguf = _locate(source, trust_remote_code)
    options = {"trust_remote_code": trust_remote_code, **gguf}
    try:
        tokenizer = _from_pretrained(AutoTokenizer, where, options)
        special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
        if special.issuperset(tokenizer.get_vocab().values()):  # made up by transformers
            raise ValueError("there are no files of one")
    except Exception as error:  # files of every age and origin can fail in any way
        raise UserError(
            f"The judge {source} has no tokenizer that can be read ({_first_line(error)}): put its "
            "tokenizer.json beside its weights."
        ) from error
    options |= {"dtype": dtype, "use_safetensors": True, "output_loading_info": True}
    try:
        model, found = _from_pretrained(AutoModelForCausalLM, where, options)
    except Exception as error:
        raise UserError(
            f"The judge {source} cannot be loaded ({_first_line(error)}). It must be a causal "
            "language model of transformers with its weights in safetensors, not pickled."
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise UserError(f"The judge {source} is incomplete: its weights lack `{missing[0]}`.")
    return [Path(source)] if gguf else _telling_files(where), tokenizer, model


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


def _telling_files(where: str) -> list[Path]:
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
    """Load without a word, and without a network where everything is here."""
    with redirect_stderr(StringIO()):
        try:
            return kind.from_pretrained(where, local_files_only=True, **options)
        except (OSError, ValueError):
            if Path(where).is_dir():
                raise
            return kind.from_pretrained(where, **options)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".: ")


@torch.no_grad()
def _require_causal(name: str, model: Any) -> None:
    """Refuse a model that sees the tokens it should predict: it would call anything probable."""
    ids = torch.zeros(2, 4, dtype=torch.long, device=model.device)
    ids[1, -1] = 1
    one, other = model(ids, use_cache=False).logits[:, :-1].float()
    if float((one - other).abs().max()) > 0.01 * float(one.abs().max()):
        raise UserError(f"The judge {name} looks at later tokens: it is not a causal model.")


def _start_token(name: str, tokenizer: Any, bos: Bos) -> int | None:
    """Id to put before every text, if any."""
    token: int | None = tokenizer.bos_token_id
    if bos == "never":
        return None
    if bos == "always":
        if token is None:
            raise UserError(f"The judge {name} has no start token: use bos `auto` or `never`.")
        return token
    if bos != "auto":
        raise UserError(f"bos is {bos!r}: use auto, always or never.")
    plain, full = (tokenizer("a", add_special_tokens=a)["input_ids"] for a in (False, True))
    return token if full[:1] == [token] and plain[:1] != [token] else None


def _context(config: Any, tokenizer: Any) -> int | None:
    """Tokens that a model reads at most; None if nobody says."""
    for name in ("max_position_embeddings", "n_positions"):
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    limit = tokenizer.model_max_length
    return limit if limit < 1 << 31 else None  # without a limit of its own it says 10^30


def _max_length(name: str, wanted: int | None, context: int | None) -> int | None:
    if wanted is None:
        return context
    if wanted < 2:
        raise UserError(f"The judge's max_length is {wanted}: use 2 or more.")
    if context is not None and wanted > context:
        raise UserError(
            f"The judge's max_length is {wanted}, but {name} reads {context} tokens: use less."
        )
    return wanted


def _sample_file(path: Path) -> bytes:
    """Name, size and some content of a file: cheap, and different for different weights."""
    size = path.stat().st_size
    with path.open("rb") as file:
        parts = [f"{path.name}/{size}".encode()]
        for start in (0, size // 2, size - SAMPLED_BYTES):
            file.seek(max(start, 0))
            parts.append(file.read(SAMPLED_BYTES))
    return hashlib.sha256(b"".join(parts)).digest()

"""Our models in EleutherAI's lm-evaluation-harness, under the name `didi`.

    python -m didi_instruct.tasks.harness --model didi --model_args pretrained=SOURCE,steps=16 \
        --tasks hellaswag

is `lm_eval` with that name known: the harness finds models in its own registry alone, which no
installed package can enter from outside. In Python, `register()` does the same.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from didi_instruct.config.schema import parse
from didi_instruct.errors import MissingExtraError, UserError
from didi_instruct.model import Model, load
from didi_instruct.models.compile import warn_once
from didi_instruct.seeding import mix
from didi_instruct.tasks.encoding import Encoded, encode_pairs, fit
from didi_instruct.tasks.scoring import TOKENS, Scorer
from didi_instruct.tasks.task import NamedModel, Progress
from didi_instruct.tasks.writing import GREEDY_SAMPLERS, write

NAME = "didi"
HARNESS_DEVICE = "cuda:0"
"""The harness's device where nobody chose one, whether it is there or not."""
MAX_TOKENS = 256
"""Tokens written where a task does not say how many."""
_COUNTS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks have for the number of tokens to write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessOptions:
    """Names and defaults of `--model_args`."""

    pretrained: str
    """A SOURCE: a shipped name, a folder, a file of weights, a hub id."""
    steps: int = 16
    """Of writing, for each text; a left-to-right model takes one for each token."""
    draws: int = 32
    """For the likelihood of an answer of several tokens."""
    sampler: str | None = None
    """As in `didi generate`; for greedy tasks one that writes the likeliest tokens if not said."""
    seed: int = 0
    """Of draws and of writing."""
    batch_tokens: int = TOKENS
    """Tokens of a forward pass; the harness's own `--batch_size` has no effect."""
    tokenizer: str | None = None
    """Of a model that brings none."""
    device: str | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        if min(self.steps, self.draws, self.batch_tokens) < 1 or self.seed < 0:
            raise UserError("steps, draws and batch_tokens are 1 or more, seed 0 or more.")


@dataclass(frozen=True, slots=True)
class Writing:
    """Settings of a generation task."""

    until: tuple[str, ...]
    count: int
    temperature: float
    top_p: float
    top_k: int | None

    @classmethod
    def of(cls, asked: Mapping[str, Any]) -> "Writing":
        """Read a task's `generation_kwargs`; what is not supported is refused by name."""
        known = ("until", *_COUNTS, "do_sample", "temperature", "top_p", "top_k")
        for name in asked:
            if name not in known:
                raise UserError(f"generation_kwargs: `{name}` is not supported: leave it out.")
        until = asked.get("until") or ()
        count = next((asked[name] for name in _COUNTS if asked.get(name) is not None), MAX_TOKENS)
        top_k, drawn = asked.get("top_k"), asked.get("do_sample", False)
        return cls(
            (until,) if isinstance(until, str) else tuple(until),
            int(count),
            float(asked.get("temperature", 1.0)) if drawn else 0.0,
            float(asked.get("top_p", 1.0)),
            None if top_k is None else int(top_k),
        )

    def cut(self, text: str) -> str:
        """Cut a text before the first of the stop strings."""
        for stop in self.until:
            text = text.split(stop, 1)[0] if stop else text
        return text


def quiet(stage: str, done: int, total: int) -> None:
    """Show no progress."""


class HarnessModel:
    """A model that answers the harness's requests: texts in, numbers and texts out."""

    def __init__(self, model: Model, options: HarnessOptions, progress: Progress = quiet) -> None:
        if model.tokenizer is None:
            raise UserError(
                f"{options.pretrained}: brings no tokenizer; name it as tokenizer=... in "
                "--model_args."
            )
        self.entry, self.options = NamedModel(options.pretrained, model), options
        self.tokenizer, self.progress = model.tokenizer, progress
        self.scorer = Scorer(
            model, draws=options.draws, seed=options.seed, batch_tokens=options.batch_tokens
        )

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation of its context, and whether it is the greedy one.

        Continuations of one context share their noise, and one pass where each is a single token:
        that is exact. Those of several tokens have a bound for their likelihood, by stratified
        draws; a left-to-right model is exact. Greedy is what the model writes at temperature 0,
        given the number of tokens.
        """
        encoded = self._encode(pairs)
        by_context: dict[str, list[int]] = {}
        for i, (context, _) in enumerate(pairs):
            if encoded[i].answer:  # an empty continuation is certain
                by_context.setdefault(context, []).append(i)
        groups = list(by_context.values())
        found = self.scorer.choices(
            [[encoded[i] for i in group] for group in groups],
            [*by_context],
            lambda done: self.progress("likelihood", done, len(groups)),
        )
        greedy = self._greedy(encoded)
        scores = [0.0] * len(pairs)
        for group, values in zip(groups, found, strict=True):
            for i, value in zip(group, values.tolist(), strict=True):
                scores[i] = value
        return [
            (score, greedy[tuple(pair.prompt), len(pair.answer)] == pair.answer)
            for score, pair in zip(scores, encoded, strict=True)
        ]

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Log-probability of each text, in windows of the model's length.

        Windows do not overlap, but for the last, which is filled with the tokens before it. A
        diffusion model's is a bound, by stratified draws in each window.
        """
        length = self.entry.model.config.length
        pieces, owners = [], []
        for number, tokens in enumerate(self._tokens(texts)):
            for first in range(0, len(tokens), length):
                answer = tokens[first : first + length]
                before = max(0, first + len(answer) - length)
                pieces.append(Encoded(tokens[before:first], answer))
                owners.append(number)
        keys = [f"window {n} of {texts[owner]}" for n, owner in enumerate(owners)]
        tell = lambda done: self.progress("likelihood", done, len(pieces))  # noqa: E731
        found = self.scorer.answers(pieces, keys, tell).tolist() if pieces else []
        totals = [0.0] * len(texts)
        for owner, value in zip(owners, found, strict=True):
            totals[owner] += value
        return totals

    def generate(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Text behind each prompt, cut before the first stop string or end of text.

        Where the window has no room for both, fewer tokens are written, down to half the window,
        and then the prompt is cut from the left.
        """
        length, texts, done = self.entry.model.config.length, [""] * len(requests), 0
        prompts = self._tokens([prompt for prompt, _ in requests])
        by_wish: dict[Writing, list[int]] = {}
        for i, (_, asked) in enumerate(requests):
            by_wish.setdefault(Writing.of(asked), []).append(i)
        for wish, members in by_wish.items():
            room = {i: max(length - len(prompts[i]), (length + 1) // 2) for i in members}
            counts = {i: min(wish.count, room[i]) for i in members}
            given = {i: prompts[i][max(0, len(prompts[i]) + counts[i] - length) :] for i in members}
            self._tell_cut(sum(len(given[i]) < len(prompts[i]) for i in members), len(members))
            for batch in self._batches(members, {i: len(given[i]) + counts[i] for i in members}):
                asked_for = [given[i] for i in batch], [counts[i] for i in batch]
                for i, tokens in zip(batch, self._write(*asked_for, wish, batch[0]), strict=True):
                    texts[i] = wish.cut(self.tokenizer.decode(tokens, stop_at_eot=True))
                done += len(batch)
                self.progress("writing", done, len(requests))
        return texts

    def _encode(self, pairs: Sequence[tuple[str, str]]) -> list[Encoded]:
        """Tokens of contexts and continuations, contexts cut from the left to fit the window."""
        length = self.entry.model.config.length
        where = [f"the request {context[-40:]!r} + {more[:40]!r}" for context, more in pairs]
        encoded: list[Encoded] = [Encoded([], [])] * len(pairs)
        usual = [i for i, (context, more) in enumerate(pairs) if context.strip() and more.strip()]
        found = encode_pairs(self.entry, [pairs[i] for i in usual], [where[i] for i in usual])
        for i, pair in zip(usual, found, strict=True):
            encoded[i] = fit(pair, length, where[i])
        cut = sum(encoded[i].prompt != pair.prompt for i, pair in zip(usual, found, strict=True))
        self._tell_cut(cut, len(pairs))
        rest = sorted(set(range(len(pairs))) - set(usual))
        texts = self._tokens([more for i in rest for more in pairs[i]])
        for i, prompt, answer in zip(rest, texts[::2], texts[1::2], strict=True):
            encoded[i] = fit(Encoded(prompt, answer), length, where[i])
        return encoded

    def _tell_cut(self, cut: int, of: int) -> None:
        if cut:
            warn_once(
                f"{cut} of {of} contexts are cut from the left, to fit the "
                f"{self.entry.model.config.length} tokens that {self.entry.name} reads."
            )

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer.encode(list(texts))

    def _greedy(self, pairs: Sequence[Encoded]) -> dict[tuple[tuple[int, ...], int], list[int]]:
        """Greedy tokens behind each prompt, by prompt and number of tokens."""
        wanted = sorted({(tuple(pair.prompt), len(pair.answer)) for pair in pairs})
        wish, found = Writing((), 0, 0.0, 1.0, None), {w: list[int]() for w in wanted}
        widths = {n: len(prompt) + count for n, (prompt, count) in enumerate(wanted) if count}
        done = 0
        for batch in self._batches([*widths], widths):
            chosen = [wanted[n] for n in batch]
            wrote = self._write([p for p, _ in chosen], [count for _, count in chosen], wish, 0)
            found.update(zip(chosen, wrote, strict=True))
            done += len(batch)
            self.progress("greedy answers", done, len(widths))
        return found

    def _write(
        self, prompts: Sequence[Sequence[int]], counts: Sequence[int], wish: Writing, number: int
    ) -> list[list[int]]:
        options, kind = self.options, self.entry.model.config.kind
        greedy = GREEDY_SAMPLERS[kind] if wish.temperature == 0 else None
        return write(
            self.entry.model,
            prompts,
            counts,
            batch_tokens=options.batch_tokens,
            steps=options.steps,
            sampler=options.sampler or greedy,
            temperature=wish.temperature,
            top_p=wish.top_p,
            top_k=wish.top_k,
            seed=mix(options.seed, "harness", number) >> 31,
        )

    def _batches(self, members: Sequence[int], widths: Mapping[int, int]) -> Iterator[list[int]]:
        """Cut requests into batches of similar widths."""
        config, batch = self.entry.model.config, list[int]()
        fixed = config.kind == "mdlm" and config.end_id is not None
        for i in sorted(members, key=lambda i: widths[i]):
            each = config.length if fixed else widths[i]
            if batch and (len(batch) + 1) * each > self.options.batch_tokens:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch


def register() -> type[Any]:
    """Make `didi` a name of models of lm-evaluation-harness; return the class behind it."""
    try:
        from lm_eval.api.model import LM
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise MissingExtraError("lm-evaluation-harness", "tasks") from error
    if NAME in model_registry:
        return cast("type[Any]", model_registry.get(NAME))

    class DidiLM(LM):  # type: ignore[misc]
        """A model of didi-instruct; its arguments are the fields of `HarnessOptions`."""

        def __init__(
            self, batch_size: Any = None, max_batch_size: Any = None, **settings: Any
        ) -> None:
            super().__init__()
            if settings.get("device") == HARNESS_DEVICE and not torch.cuda.is_available():
                del settings["device"]
            options = parse(HarnessOptions, settings, where="--model_args")
            model = load(
                options.pretrained,
                device=options.device,
                dtype=options.dtype,
                tokenizer=options.tokenizer,
            )
            self.asked, self._device = HarnessModel(model, options, Bars()), model.device

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return self.asked.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return self.asked.rolling([request.args[0] for request in requests])

        def generate_until(self, requests: list[Any]) -> list[str]:
            return self.asked.generate([request.args for request in requests])

    model_registry.register(NAME)(DidiLM)
    return DidiLM


class Bars:
    """Progress as the harness shows it: a bar for each stage."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: Any = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that a part of a stage is done."""
        from tqdm import tqdm

        if self._bar is None or stage != self._stage:
            self._stage, self._bar = stage, tqdm(total=total, desc=stage)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()
            self._bar = None


def main() -> None:
    """Run `lm_eval` with our models; mistakes are told in one line."""
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except UserError as error:
        sys.stderr.write(f"didi: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()

"""The models of a server: what is told about them, and requests for them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

from didi_instruct.data.chat import ChatTemplate
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.model import Model
from didi_instruct.sampling.generate import Request
from didi_instruct.sampling.infill import parse_gaps, split_infill
from didi_instruct.sampling.registry import SAMPLERS, USUAL_STEPS, find_sampler
from didi_instruct.sampling.state import PAD
from didi_instruct.sampling.trace import token_texts
from didi_instruct.serving.api_errors import ApiError, wrong
from didi_instruct.serving.schemas import Completion, Infill, Sampling

T = TypeVar("T")
AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
MASK_SHOWN = "░"

Role = Literal["student", "teacher", "ar", "model"]


@dataclass(frozen=True)
class Served:
    """A model with a name, and how it stands to the others."""

    name: str
    model: Model
    role: Role
    chat: ChatTemplate | None = None
    """Template of conversations."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model, which has one."""
        if self.model.tokenizer is None:
            raise UserError(
                f"{self.name} has no tokenizer, so its samples are no text and cannot be served."
            )
        return self.model.tokenizer

    @cached_property
    def pieces(self) -> "Pieces":
        """Texts of its tokens."""
        return Pieces(self.tokenizer)

    @cached_property
    def samplers(self) -> list[str]:
        """Names of the samplers that it can be asked for."""
        config, guided = self.model.config, self.model.discriminator is not None
        return [s.name for s in SAMPLERS.values() if s.fits(config, has_discriminator=guided)]

    def describe(self, created: int) -> dict[str, Any]:
        """Entry of `/v1/models`."""
        config = self.model.config
        return {
            "id": self.name,
            "object": "model",
            "created": created,
            "owned_by": "didi-instruct",
            "kind": config.kind,
            "length": config.length,
            "samplers": self.samplers,
            "steps": None if config.kind == "ar" else USUAL_STEPS,
            "role": self.role,
            "proteins": self.tokenizer.size < 64 and all(a in self.tokenizer for a in AMINO_ACIDS),
            "mask": MASK_SHOWN,
        }


class Pieces:
    """Texts of the tokens of a canvas."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode, self._eot_id = tokenizer.decode, tokenizer.eot_id
        self._known: dict[int, str] = {}

    def of(self, tokens: Sequence[int | None]) -> list[str | None]:
        """Text of each position, None for None and "" for an end of text.

        Joined, they are the text of the tokens.
        """
        shown = [token for token in tokens if token is not None and token != self._eot_id]
        texts = [self._text(token) for token in shown]
        if "".join(texts) != self._decode(shown):  # a character of several tokens, say
            filled = [PAD if t is None or t == self._eot_id else t for t in tokens]
            found = token_texts(filled, self._decode)
            return [None if t is None else piece for t, piece in zip(tokens, found, strict=True)]
        each = iter(texts)
        return [None if t is None else "" if t == self._eot_id else next(each) for t in tokens]

    def _text(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._decode([token])
        return self._known[token]


def role_of(model: Model, *, beside_student: bool) -> Role:
    """Role of a model beside the others, as far as its provenance tells."""
    if model.config.kind == "ar":
        return "ar"
    if "teacher" in model.provenance:
        return "student"
    return "teacher" if beside_student else "model"


class Catalogue:
    """The served models by name, and requests for them."""

    def __init__(self, served: Sequence[Served], *, most_texts: int, most_positions: int) -> None:
        self.served = {one.name: one for one in served}
        self.most_texts, self.most_positions = most_texts, most_positions
        self.created = int(time.time())
        for one in served:
            assert one.tokenizer  # refused here, not at the first request

    @property
    def models(self) -> Mapping[str, Model]:
        """The models alone."""
        return {name: one.model for name, one in self.served.items()}

    def list(self) -> dict[str, Any]:
        """Answer of `/v1/models`."""
        data = [one.describe(self.created) for one in self.served.values()]
        return {"object": "list", "data": data}

    def find(self, name: str | None, param: str = "model") -> Served:
        """The model of that name, or the first."""
        if name is None:
            return next(iter(self.served.values()))
        if name not in self.served:
            known = ", ".join(f"`{other}`" for other in self.served)
            message = f"There is no such model here. Served: {known}."
            raise ApiError(404, message, param, "model_not_found")
        return self.served[name]

    def completion(self, served: Served, body: Completion) -> Request:
        """Request of `/v1/completions`."""
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        self._check(served, body, len(prompts))
        if body.suffix and served.model.config.kind == "ar":
            raise wrong("An AR model cannot write before a text: leave out suffix.", "suffix")
        length = None
        if body.max_tokens is not None:
            texts = [*prompts, body.suffix or ""]
            *counts, after = (len(ids) for ids in served.tokenizer.encode(texts))
            if len(set(counts)) > 1:
                message = (
                    "Prompts of different lengths with max_tokens are not supported: send a "
                    "request for each."
                )
                raise wrong(message, "max_tokens")
            length = min(counts[0] + after + body.max_tokens, served.model.config.length)
        prompt = body.prompt if isinstance(body.prompt, str) else tuple(body.prompt)
        return Request(
            prompt=prompt or None, suffix=body.suffix or None, length=length, **_shared(body)
        )

    def infill(self, served: Served, body: Infill) -> Request:
        """Request of `/v1/infill`."""
        self._check(served, body, 1)
        if served.model.config.kind == "ar":
            raise wrong("An AR model writes from left to right and cannot fill gaps.", "model")
        pieces = _check_as("text", lambda: split_infill(body.text))
        _check_as("gap", lambda: parse_gaps(body.gap or "auto", len(pieces) - 1))
        return Request(infill=body.text, gap=body.gap, **_shared(body))

    def _check(self, served: Served, body: Sampling, prompts: int) -> None:
        """Refuse what is too much, and settings that this model does not have."""
        texts, config = body.n * prompts, served.model.config
        if texts > self.most_texts:
            message = f"{texts} texts are asked for, and at most {self.most_texts} may be."
            raise wrong(message, "n")
        # Re-ranking holds several candidates of each text at a time.
        candidates = body.options.get("candidates")
        copies = candidates if isinstance(candidates, int | float) else 1
        if texts * max(1, copies) * config.length > self.most_positions:
            message = (
                f"That is more than the {self.most_positions} tokens that a request may hold: ask "
                "for fewer texts, or fewer candidates of each."
            )
            raise wrong(message, "options" if copies > 1 else "n")
        try:
            sampler = find_sampler(body.sampler, config.kind)
        except UserError as error:
            raise wrong(str(error), "sampler") from error
        if sampler.counts_tokens and body.steps is not None:
            raise wrong(f"`{sampler.name}` takes a step per token: leave out steps.", "steps")
        if body.judge is not None:
            self._check_judge(served, self.find(body.judge, "judge"))

    def _check_judge(self, served: Served, judge: Served) -> None:
        same = judge.tokenizer.hash == served.tokenizer.hash
        if not same or judge.model.config.length < served.model.config.length:
            raise wrong(
                f"`{judge.name}` cannot judge `{served.name}`: it reads other tokens, or fewer.",
                "judge",
            )


def _check_as(param: str, check: Callable[[], T]) -> T:
    """Name the parameter that a check is about."""
    try:
        return check()
    except UserError as error:
        raise wrong(str(error).removeprefix("--"), param) from error


def _shared(body: Sampling) -> dict[str, Any]:
    names = ("steps", "sampler", "temperature", "top_p", "top_k", "seed")
    settings = {name: getattr(body, name) for name in names}
    options = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in body.options.items()
    }
    return {"num": body.n, "options": options, **settings}

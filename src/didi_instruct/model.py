"""The public model: sampling, text, likelihood, saving."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from didi_instruct.config.model import ModelConfig
from didi_instruct.data.tokenizer import Tokenizer
from didi_instruct.errors import UserError
from didi_instruct.hub import export
from didi_instruct.hub.model_card import CardOptions
from didi_instruct.hub.sources import LoadOptions, Source, load_source
from didi_instruct.models.ar import ARModel
from didi_instruct.models.checkpoint import LoadedModel
from didi_instruct.models.compile import warn_once
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.dit import DiT
from didi_instruct.models.foreign.layouts import WeightSet
from didi_instruct.models.foreign.shapes import Family
from didi_instruct.models.masked_network import MaskedLM
from didi_instruct.process.schedule import make_schedule
from didi_instruct.sampling.denoiser import CachedDenoiser
from didi_instruct.sampling.engines.cuda import Decoders, why_not
from didi_instruct.sampling.generate import Request, generate, to_text
from didi_instruct.sampling.guide import DiscriminatorGuide
from didi_instruct.sampling.registry import SampledModel
from didi_instruct.sampling.state import Callback, Samples
from didi_instruct.training.distributed import pick_device
from didi_instruct.training.likelihood import Likelihood, likelihood
from didi_instruct.training.objectives import make_objective

if TYPE_CHECKING:
    from didi_instruct.models.network import Network

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Types that weights may be cast to, by name."""


class Model:
    """A denoiser (or AR model), its tokenizer and noise schedule and, maybe, a discriminator."""

    def __init__(
        self,
        network: nn.Module,
        config: ModelConfig,
        tokenizer: Tokenizer | None = None,
        discriminator: Discriminator | None = None,
        provenance: dict[str, Any] | None = None,
    ) -> None:
        self.network, self.config, self.tokenizer = network.eval(), config, tokenizer
        self.discriminator, self.provenance = discriminator, provenance or {}
        self.schedule = make_schedule(config.schedule)
        self.cast: str | None = None
        """What its weights were rounded to when it was loaded; None: they are as they were."""
        # Laid out for the machine: made when asked for, and left out of copies.
        self._denoiser: CachedDenoiser | None = None
        self._decoders: Decoders | None = None
        self._guide: DiscriminatorGuide | None = None

    def accelerate(self) -> bool:
        """Sample by compiled passes and CUDA graphs from now on; return False where that cannot be.

        The first passes of each shape then take some seconds longer, all later ones are faster, and
        samples have the same law. Weights that change later are noticed; the discriminator's take
        no gradients any more. In a left-to-right model, only texts without a prompt, at temperature
        1 and without a callback become faster.
        """
        if reason := why_not(self.network):
            warn_once(f"Sampling is not accelerated: {reason}.")
            return False
        if isinstance(self.network, ARModel):
            self._decoders = Decoders(self.network)
        else:
            self._cached().accelerate()
            self._guide = None
        return True

    @property
    def is_accelerated(self) -> bool:
        """True once `accelerate` has succeeded."""
        return self._decoders is not None or (
            self._denoiser is not None and self._denoiser.accelerated
        )

    @property
    def mask_id(self) -> int | None:
        """Id of the mask; None for uniform-state models."""
        return self.config.mask_id

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.network.parameters()).device

    @torch.no_grad()
    def denoiser(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        """Logits of the clean tokens given noisy ones at time t.

        Shapes: tokens (B, L), t a number or (B,) -> (B, L, V) over the real tokens.
        """
        if isinstance(self.network, ARModel):
            raise UserError("An AR model has no denoiser: it reads clean text from left to right.")
        time = torch.as_tensor(t, dtype=torch.float32, device=self.device)
        sigma = self.schedule.sigma(time.expand(len(tokens)))
        logits: Tensor = self.network(self._checked(tokens), sigma)
        return logits

    def nelbo(self, tokens: Tensor, *, seed: int = 0, draws: int = 8) -> Tensor:
        """Mean over sequences of an upper bound of the NLL, in nats per token (exact for AR)."""
        tokens = self._checked(tokens).cpu()
        if tokens.numel() and int(tokens.max()) >= self.config.num_tokens:
            raise UserError("nelbo measures clean text, but the tokens contain masks.")
        never = self.without_likelihood(tokens)
        if len(never):
            raise UserError(
                f"{len(never)} of {tokens.numel()} tokens are such as this model never writes (id "
                f"{int(never[0])}), so it has no likelihood of the text: give text without them."
            )
        result = self.likelihood(
            lambda start, count: tokens[start : start + count],
            sequences=len(tokens),
            draws=draws,
            seed=seed,
        )
        return torch.tensor(result.nats_per_token, dtype=torch.float64)

    def never_written(self, tokens: Tensor) -> Tensor:
        """Return those of the tokens that the model never writes, such as special tokens."""
        banned = self.config.banned
        if isinstance(self.network, MaskedLM):
            banned = self.network.ids.banned
        return tokens[torch.isin(tokens, tokens.new_tensor(banned))]

    def without_likelihood(self, tokens: Tensor) -> Tensor:
        """Return those of the tokens that the model neither writes nor is given.

        They have probability 0 in exact terms, and an arbitrary large cost in ours.
        """
        never = self.never_written(tokens)
        given = (*self.config.banned, *self.config.never_drawn)
        return never[~torch.isin(never, never.new_tensor(given))]

    def likelihood(
        self, data: Callable[[int, int], Tensor], *, sequences: int, **settings: Any
    ) -> Likelihood:
        """NELBO (or NLL) over rows of `data(start, count)`, with its interval."""
        objective = make_objective(self.config)
        return likelihood(
            lambda batch: objective.loss(self.network, batch),
            self.config,
            data,
            sequences=sequences,
            device=self.device,
            **settings,
        )

    def sample(self, num: int = 1, **settings: Any) -> Tensor:
        """Draw token sequences, LongTensor (num, length); settings are the fields of `Request`.

        Without `length` they are as long as the model's window; where texts have windows of their
        own, each then has a length that is drawn, and is followed by its end. With `lengths` they
        are padded with -1 to the longest.
        """
        return self.request(Request.of(num, settings)).cut().tokens

    def generate(self, num: int = 1, **settings: Any) -> list[str]:
        """Draw texts, each up to its end-of-text; settings are the fields of `Request`."""
        drawn = self.request(Request.of(num, settings))
        return self.texts(drawn.tokens, drawn.written)

    def draw(self, num: int = 1, *, callback: Callback | None = None, **settings: Any) -> Samples:
        """Draw sequences together with the log-probability of their paths and what they cost."""
        request = Request.of(num, {"measure_path": True} | settings)
        return self.request(request, callback=callback).cut()

    def request(self, request: Request, *, callback: Callback | None = None) -> Samples:
        """Draw what a request asks for; the callback sees every step."""
        return generate(request, self.sampled(), callback)

    def sampled(self) -> SampledModel:
        """Return the model as samplers see it, with its weights as they are now."""
        is_ar = isinstance(self.network, ARModel)
        return SampledModel(
            network=self.network,
            config=self.config,
            tokenizer=self.tokenizer,
            schedule=self.schedule,
            denoiser=None if is_ar else self._cached().current(),
            guide=self._as_guide(),
            decoders=self._decoders,
        )

    def _cached(self) -> CachedDenoiser:
        if self._denoiser is None:
            self._denoiser = CachedDenoiser(cast("Network", self.network), self.schedule)
        return self._denoiser

    def texts(self, tokens: Tensor, written: Tensor | None = None) -> list[str]:
        """Decode samples; `written` (B, L) tells what was written from what was given."""
        if self.tokenizer is None:
            raise UserError("This model has no tokenizer: use `sample` for token ids.")
        return to_text(tokens, self.tokenizer, written)

    @property
    def mask_symbol(self) -> int:
        """Id that marks positions to write, in `tokens` and in the steps that a callback sees."""
        return self.config.mask_symbol

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is laid out for the machine, which can neither be copied nor pickled."""
        return self.__dict__ | {"_denoiser": None, "_decoders": None, "_guide": None}

    def _as_guide(self) -> DiscriminatorGuide | None:
        if self.discriminator is None:
            return None
        if self._guide is None or self._guide.discriminator is not self.discriminator:
            fast = self._denoiser is not None and self._denoiser.accelerated
            self._guide = DiscriminatorGuide(self.discriminator, self.schedule, fast=fast)
        return self._guide

    def save(self, folder: str | Path, *, license: str | None = None) -> None:
        """Write the model in the layout that `didi.load` reads, with a model card.

        `license` is the hub's name of the weights' licence (`mit`, `apache-2.0`); the card says
        none where none is given. A README.md that someone else wrote stays as it is.
        """
        export.save(self._as_loaded(), Path(folder), str(folder), CardOptions(license=license))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = False,
        token: str | None = None,
        license: str | None = None,
    ) -> str:
        """Upload the model and its card to the Hugging Face hub; return the address."""
        card = CardOptions(license=license)
        return export.push(self._as_loaded(), repo_id, card, private=private, token=token)

    def _as_loaded(self) -> LoadedModel:
        parts = self.tokenizer, self.discriminator, self.provenance
        return LoadedModel(self.network, self.config, *parts)

    def _checked(self, tokens: Tensor) -> Tensor:
        if tokens.ndim != 2 or not 1 <= tokens.shape[1] <= self.config.length:
            raise UserError(
                f"tokens have shape {tuple(tokens.shape)}: (batch, up to {self.config.length})."
            )
        if (
            tokens.numel()
            and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.config.vocab_size
        ):
            raise UserError(f"A token id lies outside 0..{self.config.vocab_size - 1}.")
        return tokens.to(self.device)


def dtype_of(name: str) -> torch.dtype:
    """Type of weights by its name."""
    if name == "float8":
        raise UserError("float8 was removed: use bfloat16.")
    if name not in DTYPES:
        raise UserError(f"`{name}` is not a dtype. Known: {', '.join(DTYPES)}.")
    return DTYPES[name]


def load(
    source: str | Path | Source,
    *,
    device: str | None = None,
    dtype: torch.dtype | str | None = None,
    time_conditioning: bool | None = None,
    weights: WeightSet = "ema",
    family: Family | None = None,
    tokenizer: str | Path | None = None,
    fast: bool = False,
) -> Model:
    """Open any SOURCE: a shipped name, a folder, a public checkpoint, a Hugging Face id.

    `time_conditioning` overrides what the model was trained with: the released DiDi-Instruct code
    tells its student the real time although the teacher was trained without. `dtype` casts the
    weights: `bfloat16` makes sampling faster on a GPU, and on a CPU that has instructions for it.
    `weights`, `family` and `tokenizer` are for public checkpoints: the set of weights of a training
    run, the family of a network that does not say its own, and the tokenizer (`gpt2`, or a folder)
    of one that brings none. `fast` calls `Model.accelerate`, which is worth its compiling where
    much is sampled on a GPU.
    """
    options = LoadOptions(
        device=str(pick_device(device)),
        dtype=dtype_of(dtype) if isinstance(dtype, str) else dtype,
        weights=weights,
        family=family,
        tokenizer=tokenizer,
    )
    loaded = load_source(source, options)
    config = loaded.config
    if time_conditioning is not None:
        config = _tell_time(loaded.model, config, time_conditioning)
        if loaded.discriminator is not None:
            trunk = loaded.discriminator.trunk
            _tell_time(trunk, trunk.config, time_conditioning)
    model = Model(loaded.model, config, loaded.tokenizer, loaded.discriminator, loaded.provenance)
    model.cast = None if dtype is None else str(dtype).removeprefix("torch.")
    if fast:
        model.accelerate()
    return model


def _tell_time(network: object, config: ModelConfig, wanted: bool) -> ModelConfig:
    """Switch time conditioning on or off; return the network's configuration."""
    if isinstance(network, DiT):
        network.config = replace(config, time_conditioning=wanted)
        return network.config
    if wanted:
        raise UserError("This network has no time embedding: leave out `time_conditioning`.")
    return config

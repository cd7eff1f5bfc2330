"""Rivals of a sampler: bare passes, naive sampling and left-to-right models."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from didi_instruct.benchmarking.isolated import Isolated
from didi_instruct.benchmarking.naive_sampling import NaiveSampler
from didi_instruct.benchmarking.timing import Case
from didi_instruct.config.model import ModelConfig
from didi_instruct.model import Model
from didi_instruct.models.ar import ARModel
from didi_instruct.models.dit import DiT
from didi_instruct.models.network import Modulations, Network
from didi_instruct.sampling.autoregressive import autoregressive
from didi_instruct.sampling.draw import DrawOptions
from didi_instruct.sampling.engines.cuda import Decoders
from didi_instruct.sampling.engines.cuda_graphs import capture
from didi_instruct.sampling.guide import DiscriminatorGuide
from didi_instruct.sampling.state import Canvas, State
from didi_instruct.seeding import mix


def trunk_case(network: Network, start: Tensor, steps: Callable[[], int], *, fast: bool) -> Case:
    """`trunk`: bare passes of the trunk on the whole batch, one for each step of the sampler.

    `steps` is called in each run, since some samplers take other numbers than they are asked for.
    Passes are compiled and captured if `fast`. A sampler may be faster: it leaves out the parts of
    a pass that it does not need.
    """
    sigma = torch.ones(len(start), device=start.device)
    passes: list[Callable[[], Tensor]] = []

    @torch.no_grad()
    def run(_: int) -> int:
        if not passes:  # in the warm-up
            passes.append(_captured_trunk(network, start, sigma) if fast else plain)
        count = steps()
        for _ in range(count):
            passes[0]()
        return count

    def plain() -> Tensor:
        return network.trunk(network.embed(start), network.modulations(sigma))

    return _case("trunk", run, start, steps(), network)


def _captured_trunk(network: Network, start: Tensor, sigma: Tensor) -> Callable[[], Tensor]:
    assert isinstance(network, DiT), "no other network is captured"
    mods = network.constants()
    inputs = (start,) if mods is not None else (start, network.modulations(sigma).c)

    def trunk(tokens: Tensor, c: Tensor | None = None) -> Tensor:
        given = mods if c is None else Modulations(c)
        return network.trunk(network.embed(tokens), given)

    return functools.partial(capture(trunk, inputs), *inputs)


def naive_case(model: Model, start: Tensor, steps: int, *, guided: bool) -> Case:
    """`naive`: `NaiveSampler`, by RGAS if `guided`."""
    network, critic = cast("Network", model.network), model.discriminator if guided else None
    sampler = NaiveSampler(
        denoiser=lambda z, t: network(z, model.schedule.sigma(t)),
        schedule=model.schedule,
        mask_id=model.mask_symbol,
        steps=steps,
        order=model.config.order,
        guide=None if critic is None else DiscriminatorGuide(critic, model.schedule),
    )

    def run(seed: int) -> None:
        sampler(start, torch.Generator(start.device).manual_seed(mix("naive", seed)))

    return _case("naive", run, start, steps, network, critic)


def ar_case(config: ModelConfig, start: Tensor, dtype: torch.dtype, *, fast: bool) -> Case:
    """`ar`: a left-to-right model of the same shape with random weights, one pass per token.

    With a static cache and a CUDA graph if `fast`, else with a growing cache.
    """
    batch, length = start.shape
    model = ARModel(left_to_right(config))
    fill_zeros(model)
    model.to(start.device, dtype).eval()
    decoders = Decoders(model) if fast else None

    def run(seed: int) -> None:
        canvas = Canvas.blank(batch, length, model.config.vocab_size - 1, device=start.device)
        autoregressive(model, State(canvas, DrawOptions(seed=seed)), decoders=decoders)

    return _case("ar", run, start, length, model)


class TransformersDecoder:
    """Greedy decoding of a GPT-2 of the same shape by `transformers`.

    With a static cache and CUDA graphs if `fast`, else with a growing cache.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        fast: bool,
    ) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel  # slow to import

        self.length, self.fast = length, fast
        shape = GPT2Config(
            n_layer=config.layers, n_embd=config.hidden, n_head=config.heads,
            n_positions=length + 1, vocab_size=config.num_tokens, bos_token_id=None,
            eos_token_id=None,
        )  # fmt: skip
        model: Any = GPT2LMHeadModel(shape)  # type: ignore[no-untyped-call]
        self.model: Any = model.to(device=device, dtype=dtype).eval()
        self.prompt = torch.zeros(batch, 1, dtype=torch.long, device=device)

    def __call__(self, _: int) -> None:
        """Write `length` tokens after the first."""
        with torch.no_grad():
            self.model.generate(
                self.prompt, attention_mask=torch.ones_like(self.prompt),
                max_new_tokens=self.length, do_sample=False,
                cache_implementation="static" if self.fast else None,
                disable_compile=not self.fast, pad_token_id=0,
            )  # fmt: skip


def transformers_case(
    config: ModelConfig, start: Tensor, dtype: torch.dtype, *, fast: bool
) -> Case:
    """`transformers`: `TransformersDecoder`, in a process of its own if `fast`.

    Its compilation clears caches that the graphs of other cases need.
    """
    batch, length = start.shape
    arguments = (config, batch, length, dtype, start.device, fast)
    if not fast:
        decoder = TransformersDecoder(*arguments)
        return _case("transformers", decoder, start, length, decoder.model)
    isolated = Isolated(TransformersDecoder, *arguments, device=start.device)
    note = "timed in a process of its own, in turns with the other rows and by the same clock"
    case = _case("transformers", isolated, start, length)
    return replace(case, peak_elsewhere=lambda: isolated.peak, note=note)


def left_to_right(config: ModelConfig) -> ModelConfig:
    """Return the config of an AR model with the trunk and the tokens of another model."""
    return replace(
        config, kind="ar", masks=1, vocab_size=config.num_tokens + 1, order="random", end_id=None,
        lengths=(), time_conditioning=False,
    )  # fmt: skip


@torch.no_grad()
def fill_zeros(network: nn.Module, seed: int = 0) -> None:
    """Fill weights that start at zero with small random values: GPUs are faster on zeros."""
    generator = torch.Generator().manual_seed(mix("weights", seed))
    for parameter in network.parameters():
        if not parameter.any():
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))


def _case(
    name: str, run: Callable[[int], object], start: Tensor, steps: int, *networks: object
) -> Case:
    modules = tuple(network for network in networks if isinstance(network, nn.Module))
    batch, length = start.shape
    return Case(name=name, run=run, batch=batch, length=length, steps=steps, networks=modules)

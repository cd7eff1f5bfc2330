"""What a sampler is timed against: bare passes, the plain way, left to right."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from didi_instruct.benchmarking.apart import Apart
from didi_instruct.benchmarking.naive import naive_ancestral, naive_rgas
from didi_instruct.benchmarking.timing import Case
from didi_instruct.config.model import ModelConfig, Order
from didi_instruct.models.ar import ARModel
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.dit import DiT
from didi_instruct.models.network import Modulations, Network
from didi_instruct.process.schedule import Schedule
from didi_instruct.sampling.autoregressive import autoregressive
from didi_instruct.sampling.draw import DrawOptions
from didi_instruct.sampling.engines.cuda import Decoders
from didi_instruct.sampling.engines.cuda_graphs import capture
from didi_instruct.sampling.guide import DiscriminatorGuide, Guidance
from didi_instruct.sampling.state import Canvas, State
from didi_instruct.seeding import mix


def floor_case(network: Network, start: Tensor, steps: Callable[[], int], *, fast: bool) -> Case:
    """As many passes of the trunk alone as there are steps, on the whole batch: `trunk`.

    `steps` are asked for in each run: some samplers take others than are wanted. Compiled and
    captured if `fast`: the time of bare, whole passes. A sampler saves the parts of them that it
    does not need.
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
    assert isinstance(network, DiT), "others are not captured"
    mods = network.constants()
    inputs = (start,) if mods is not None else (start, network.modulations(sigma).c)

    def trunk(tokens: Tensor, c: Tensor | None = None) -> Tensor:
        given = mods if c is None else Modulations(c)
        return network.trunk(network.embed(tokens), given)

    return functools.partial(capture(trunk, inputs), *inputs)


def naive_case(
    network: Network,
    schedule: Schedule,
    start: Tensor,
    mask_id: int,
    steps: int,
    discriminator: Discriminator | None = None,
    guidance: Guidance | None = None,
    order: Order = "random",
) -> Case:
    """The plain way, unguided or guided by a discriminator: `naive`."""
    guide = None if discriminator is None else DiscriminatorGuide(discriminator, schedule)

    def denoiser(z: Tensor, t: Tensor) -> Tensor:
        return network(z, schedule.sigma(t))

    def run(seed: int) -> None:
        generator = torch.Generator(start.device).manual_seed(mix("naive", seed))
        if guide is None:
            naive_ancestral(
                denoiser, schedule, start, mask_id, steps=steps, generator=generator, order=order,
            )  # fmt: skip
        else:
            naive_rgas(
                denoiser, schedule, guide, start, mask_id, steps=steps, generator=generator,
                guidance=guidance, order=order,
            )  # fmt: skip

    networks = (network,) if guide is None else (network, guide.discriminator)
    return _case("naive", run, start, steps, *networks)


def ar_case(config: ModelConfig, start: Tensor, dtype: torch.dtype, *, fast: bool) -> Case:
    """A left-to-right model of the same shape with random weights, a pass per token: `ar`.

    With a static cache and a CUDA graph if `fast`, else with a cache that grows.
    """
    batch, length = start.shape
    model = ARModel(left_to_right(config))
    fill(model)
    model.to(start.device, dtype).eval()
    decoders = Decoders(model) if fast else None

    def run(seed: int) -> None:
        canvas = Canvas.blank(batch, length, model.config.vocab_size - 1, device=start.device)
        autoregressive(model, State(canvas, DrawOptions(seed=seed)), decoders=decoders)

    return _case("ar", run, start, length, model)


class TransformersDecoder:
    """A GPT-2 of the same shape, as `transformers` decodes it, greedily.

    With a static cache and CUDA graphs if `fast`, else with a cache that grows.
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
    """`TransformersDecoder` as a row: `transformers`.

    If `fast`, in a process of its own: what it compiles clears caches that others' graphs need.
    """
    batch, length = start.shape
    arguments = (config, batch, length, dtype, start.device, fast)
    if not fast:
        decoder = TransformersDecoder(*arguments)
        return _case("transformers", decoder, start, length, decoder.model)
    apart = Apart(TransformersDecoder, *arguments, device=start.device)
    case = _case("transformers", apart, start, length)
    note = "timed in a process of its own, in turns with the other rows and by the same clock"
    return replace(case, elsewhere=lambda: apart.peak, note=note)


def left_to_right(config: ModelConfig) -> ModelConfig:
    """The shape of an AR model with the trunk and the tokens of another."""
    return replace(
        config,
        kind="ar",
        masks=1,
        vocab_size=config.num_tokens + 1,
        order="random",
        end_id=None,
        lengths=(),
        time_conditioning=False,
    )


@torch.no_grad()
def fill(network: torch.nn.Module, seed: int = 0) -> None:
    """Give weights that start at zero small random values: GPUs run faster on zeros."""
    generator = torch.Generator().manual_seed(mix("weights", seed))
    for parameter in network.parameters():
        if not parameter.any():
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))


def _case(
    name: str, run: Callable[[int], object], start: Tensor, steps: int, *networks: object
) -> Case:
    modules = tuple(n for n in networks if isinstance(n, torch.nn.Module))
    batch, length = start.shape
    return Case(name=name, run=run, batch=batch, length=length, steps=steps, networks=modules)

"""What few steps cost when the denoiser is exact: the oracle language, by one of two samplers.

python experiments/exact_denoiser_steps.py [--sampler dplm] [--samples 4096] [--seed 0]
"""

import argparse

import torch

from didi_instruct.data.oracle import OracleLanguage
from didi_instruct.process.schedule import LogLinear
from didi_instruct.sampling.ancestral import ancestral
from didi_instruct.sampling.denoiser import function_denoiser
from didi_instruct.sampling.dplm import dplm
from didi_instruct.sampling.draw import DrawOptions
from didi_instruct.sampling.state import Canvas, State


def main() -> None:
    """Print one line per number of steps, with standard errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sampler", choices=["ancestral", "dplm"], default="ancestral")
    arguments = parser.parse_args()
    language = OracleLanguage.default()
    true = language.sample(arguments.samples, torch.Generator().manual_seed(arguments.seed))
    print("steps   -log p     se  path KL     se  mistakes  latent entropy")
    for steps in (1, 2, 4, 8, 16, 32, 128):
        canvas = Canvas.blank(arguments.samples, language.length, language.mask_id)
        state = State(canvas, DrawOptions(seed=arguments.seed))
        denoiser = function_denoiser(language.denoiser, language.num_tokens)
        if arguments.sampler == "dplm":
            drawn = dplm(denoiser, state, steps=steps)
        else:
            drawn = ancestral(denoiser, LogLinear(0.0), state, steps=steps)
        log_p = language.log_prob(drawn.tokens)
        # Without an exact path there is nothing to compare with.
        path = torch.nan if drawn.log_prob is None else drawn.log_prob
        show(language, str(steps), drawn.tokens, -log_p, path - log_p)
    show(language, "truth", true, -language.log_prob(true), torch.zeros(len(true)))


def show(
    language: OracleLanguage, name: str, tokens: torch.Tensor, nats: torch.Tensor, gap: torch.Tensor
) -> None:
    """Print one line."""
    root = len(nats) ** 0.5
    print(
        f"{name:>5} {nats.mean():8.2f} {nats.std() / root:6.2f} {gap.mean():8.2f} "
        f"{gap.std() / root:6.2f} {language.mistakes(tokens).any:9.3f} "
        f"{language.latent_entropy(tokens):15.2f}"
    )


if __name__ == "__main__":
    main()

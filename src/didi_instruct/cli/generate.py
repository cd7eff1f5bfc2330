"""`didi generate`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from didi_instruct.errors import UserError


def command(
    source: Annotated[
        str | None,
        typer.Argument(
            help="The model: a shipped name (`stories`, meant if none is given), a folder, a "
            "foreign checkpoint, a Hugging Face id."
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps per sample (of a block, with blocks); 16 if not said.")
    ] = None,
    num: Annotated[int, typer.Option(help="Samples (of each prompt, of each length).")] = 1,
    length: Annotated[int | None, typer.Option(help="Tokens, what is given included.")] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Several lengths, --num samples of each: 100,200,300; or a range, 100-500, from "
            "which each sample's is drawn."
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; may be repeated.")
    ] = None,
    suffix: Annotated[str | None, typer.Option(help="Text to end with.")] = None,
    infill: Annotated[
        str | None, typer.Option(help='Text with gaps to fill: "Once ___ time".')
    ] = None,
    gap: Annotated[
        str | None,
        typer.Option(
            help="Tokens of a gap: 8, 4-12, auto (the default) or auto:4-12; 20,30-40 for the "
            "first and the second."
        ),
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option(
            help="ancestral, rgas, confidence, entropy, margin, remasking, blocks, "
            "first-hitting, dimo, dplm; uniform-state; autoregressive."
        ),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="A setting of the sampler."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    batch_size: Annotated[int, typer.Option(help="Samples at a time.")] = 64,
    trace: Annotated[
        Path | None, typer.Option(help="Write the denoising as .html, .gif or .json.")
    ] = None,
    fasta: Annotated[
        Path | None,
        typer.Option(help="Write proteins to this FASTA file instead of printing them; - prints."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the weights: float32, or bfloat16, which is faster."),
    ] = None,
    fast: Annotated[
        bool,
        typer.Option(
            "--fast/--no-fast",
            help="On a GPU: compile first, then sample faster; for many samples.",
        ),
    ] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="For a foreign model that brings none: folder, file, hub id.")
    ] = None,
    weights: Annotated[
        str, typer.Option(help="Of a foreign training run's file: ema (averaged) or raw.")
    ] = "ema",
    family: Annotated[
        str | None,
        typer.Option(help="What a foreign network was trained as: mdlm, sedd, duo, ar."),
    ] = None,
) -> None:
    """Sample text or proteins: from nothing, after a prompt, or into gaps."""
    from didi_instruct.cli.progress import StepsBar
    from didi_instruct.cli.stream import TerminalStream
    from didi_instruct.config.schema import apply_overrides
    from didi_instruct.data.tokenizer import is_protein
    from didi_instruct.hub.sources import DEFAULT
    from didi_instruct.model import load
    from didi_instruct.sampling.generate import Request
    from didi_instruct.sampling.registry import find_sampler
    from didi_instruct.sampling.trace import Trace, check_path

    source = DEFAULT if source is None else source
    if trace is not None:
        check_path(trace)
    _check_fasta(fasta, as_json)
    request = Request(
        num=num, steps=steps, length=length, lengths=lengths, prompt=prompt, suffix=suffix,
        infill=infill, gap=gap, sampler=sampler,
        options=apply_overrides({}, options or (), flag="--option"), temperature=temperature,
        top_p=top_p, top_k=top_k, seed=seed, batch_size=batch_size, measure_path=as_json,
    )  # fmt: skip
    choices: Any = {"weights": weights, "family": family, "tokenizer": tokenizer, "dtype": dtype}
    model = load(source, device=device, fast=fast, **choices)
    name = find_sampler(sampler, model.config.kind).name
    if model.tokenizer is None:
        raise UserError(
            f"{source} has no tokenizer, so its samples are no text: give it with --tokenizer."
        )
    if fasta is not None and not is_protein(model.tokenizer.vocabulary):
        raise UserError(f"{source} writes text, not proteins: leave out --fasta.")
    recorded = (
        None
        if trace is None
        else Trace(
            model.mask_symbol,
            model.tokenizer.eot_id,
            about={"sampler": name, "seed": seed},
        )
    )
    batches, many = -(-request.total // batch_size), as_json or fasta is not None
    with (
        TerminalStream(model.tokenizer, model.mask_symbol, enabled=not many) as stream,
        StepsBar(batches, enabled=many) as bar,
    ):

        def watch(step: Any) -> None:
            stream(step)
            bar(step)
            if recorded is not None:
                recorded(step)

        # Watched, a left-to-right model could not write a token by one graph.
        unseen = model.is_accelerated and model.config.kind == "ar" and recorded is None
        done = model.request(request, callback=None if unseen else watch).cut()
    texts = model.texts(done.tokens, done.written)
    if as_json:
        facts = _facts(source, name, texts, done, request)
        typer.echo(json.dumps(facts, indent=1, ensure_ascii=False))
    if fasta is not None:
        _write_fasta(fasta, texts, seed)
    elif not as_json:
        _print(texts, single=request.total == 1)
    if recorded is not None and trace is not None:
        recorded.write(trace, model.tokenizer)
        typer.echo(f"Wrote {trace}", err=True)


def _check_fasta(file: Path | None, as_json: bool) -> None:
    from didi_instruct.cli.files import check_target

    if file is None:
        return
    if str(file) != "-":
        check_target(file, "--fasta")
    elif as_json:
        raise UserError("--fasta - and --json both print: name a file.")


def _write_fasta(file: Path, chains: list[str], seed: int) -> None:
    from didi_instruct.data.files import no_space_as_user_error, write_atomic
    from didi_instruct.proteins.chains import as_fasta

    content = as_fasta(chains, seed)
    if str(file) == "-":
        typer.echo(content, nl=False)
        return
    with no_space_as_user_error(file.parent):
        write_atomic(file, content.encode())
    typer.echo(f"Wrote {file}: {len(chains)} chains", err=True)


def _print(texts: list[str], *, single: bool) -> None:
    for text in texts:
        typer.echo(text if single else f"{text}\n")


def _facts(source: str, sampler: str, texts: list[str], drawn: Any, request: Any) -> dict[str, Any]:
    paths = [None] * len(texts) if drawn.log_prob is None else drawn.log_prob.tolist()
    return {
        "model": source,
        "sampler": sampler,
        "steps": request.steps,
        "nfe": drawn.nfe,
        "passes": drawn.passes,
        "disc_calls": drawn.disc_calls,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed,
        "samples": [
            {"text": text, "tokens": [t for t in row if t >= 0], "log_prob": path}
            for text, row, path in zip(texts, drawn.tokens.tolist(), paths, strict=True)
        ],
    }

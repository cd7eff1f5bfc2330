"""`didi serve`."""

import logging
import os
from typing import Annotated, Any

import typer

from didi_instruct.errors import MissingExtraError

KEY_VARIABLE = "DIDI_API_KEY"


def command(
    source: Annotated[
        str | None,
        typer.Argument(help="The model; if none is given, `stories` beside its teacher."),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE", help="A model to serve beside it; may be repeated."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all, behind a proxy alone.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            help=f"Key that clients must send. Better given as {KEY_VARIABLE}: others may read a "
            "command line."
        ),
    ] = None,
    queue: Annotated[int, typer.Option(help="Requests that wait or run; more are refused.")] = 256,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 300.0,
    grace: Annotated[
        float, typer.Option(help="Seconds to finish what runs when told to stop.")
    ] = 30.0,
    batch_tokens: Annotated[
        int | None,
        typer.Option(help="Canvas positions of one pass; by default 2048, on a GPU 65536."),
    ] = None,
    max_texts: Annotated[int, typer.Option(help="Texts of one request.")] = 16,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: float32, or bfloat16, which is faster.")
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast/--no-fast", help="On a GPU: compiled passes as CUDA graphs.")
    ] = True,
    tokenizer: Annotated[
        str | None, typer.Option(help="For foreign models that bring none: folder, file, hub id.")
    ] = None,
) -> None:
    """Serve a web page and an HTTP API in the form of OpenAI's, until Ctrl-C."""
    try:
        import fastapi  # noqa: F401
        import greenlet  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("The server", "serve") from error
    from didi_instruct.serving.run import ServeSettings, open_models, serve, usual_sources
    from didi_instruct.training.distributed import pick_device

    # An empty --api-key is an unset variable of the caller's shell: refused, not served without.
    key = os.environ.get(KEY_VARIABLE) if api_key is None else api_key
    settings = ServeSettings(
        host=host, port=port, api_key=key, queue=queue,
        seconds=timeout, grace=grace, positions=batch_tokens, most_texts=max_texts,
    )  # fmt: skip
    chosen = pick_device(device)
    choices: Any = {"device": str(chosen), "dtype": dtype, "tokenizer": tokenizer}
    sources = usual_sources(source, against or ())
    served = open_models(sources, fast=fast and chosen.type == "cuda", **choices)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")

    def say(address: str) -> None:
        typer.echo(f"Serving {', '.join(one.name for one in served)} on {address} (Ctrl-C stops)")

    serve(served, settings, listening=say)
    typer.echo("Stopped.", err=True)

"""How a judge reads: options of every command that has one."""

from typing import Annotated

import typer

JudgeTemperature = Annotated[float, typer.Option(help="Divides the judge's logits.")]
JudgeCollapsesSpaces = Annotated[
    bool,
    typer.Option("--judge-collapse-spaces", help="For judges that never saw two spaces in a row."),
]
JudgeEnd = Annotated[
    str | None,
    typer.Option(
        metavar="ID|TOKEN",
        help="What ends a text for a causal LM, for path-kl of texts that end (default: its "
        "end-of-text token).",
    ),
]
JudgeBeyond = Annotated[
    str,
    typer.Option(
        metavar="cut|uniform",
        help="Tokens after a causal LM's context: not read, or each as likely as any other, so "
        "that long texts have a path KL.",
    ),
]

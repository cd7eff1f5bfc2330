"""The `didi` command. Verbs import what they need when they run, so `--help` is instant."""

import re
import sys
import traceback
from typing import Annotated

import typer

from didi_instruct import __version__
from didi_instruct.cli import (
    bench,
    convert,
    data,
    evaluate,
    generate,
    info,
    reproduce,
    serve,
    train,
)
from didi_instruct.errors import Argument, Setting, TrainingError, UserError, first_line

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130
OUT_OF_MEMORY = "out of memory|can't allocate memory"
"""As CUDA and the CPU's allocator say it."""
GOES_ON = {
    "pretrain": "; with --resume it goes on from its last checkpoint, where it has saved one",
    "distill": "; with --resume it goes on from its last checkpoint, where it has saved one",
    "finetune": "; with --resume it goes on from its last checkpoint, where it has saved one",
    "eval": "; what was drawn and measured is kept, the same command goes on",
    "reproduce": "; what is done is kept, the same command goes on",
    "data": "; the same command goes on",
}
"""What to do after Ctrl-C, by verb."""
TASK_GOES_ON = "; states and seeds that are done are kept, the same command goes on"
TASK_BEGINS_ANEW = "; the same command begins anew"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Distil masked diffusion language models into few-step generators.",
)
app.add_typer(data.app, name="data")
app.command("pretrain")(train.pretrain)
app.command("distill")(train.distill)
app.command("finetune")(train.finetune)
app.command("generate")(generate.command)
app.command("eval")(evaluate.command)
app.command("serve")(serve.command)
app.command("bench")(bench.command)
app.command("reproduce")(reproduce.command)
app.command("convert")(convert.command)
app.command("info")(info.command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"didi-instruct {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line: errors people can mend in one line, exit codes as documented."""
    # Accepted anywhere on the line, since it is added after something went wrong.
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # what typer makes of Ctrl-C
            print(f"didi: interrupted{_goes_on(sys.argv[1:])}", file=sys.stderr)
    except Exception as error:
        if debug:
            traceback.print_exc()
        code = _explain(error)
    sys.exit(code if isinstance(code, int) else 0)


def _goes_on(arguments: list[str]) -> str:
    verb = next((word for word in arguments if not word.startswith("-")), "")
    if verb == "eval" and "--task" in arguments:
        task = arguments[arguments.index("--task") + 1]
        return TASK_GOES_ON if task == "mrpc" else TASK_BEGINS_ANEW
    return GOES_ON.get(verb, "")


def _flag(argument: Argument) -> str:
    """An argument that an error names, as it is written on the command line."""
    if isinstance(argument, Setting):
        return f"--set {argument.name}={'VALUE' if argument.value is None else argument.value}"
    flag = f"--{argument.name.replace('_', '-')}"
    return flag if argument.value is None else f"{flag} {argument.value}"


def _explain(error: Exception) -> int:
    """Print one line for an error; return the exit code."""
    if isinstance(error, UserError):
        code, text = WRONG_USAGE, str(error.reworded(_flag))
    elif isinstance(error, TrainingError):
        code, text = FAILED, str(error)
    elif hasattr(error, "format_message"):  # click's own errors: a bad flag, a missing argument
        code, text = getattr(error, "exit_code", WRONG_USAGE), error.format_message()
        if text and (context := getattr(error, "ctx", None)) is not None:
            text = f"{text.rstrip('.')}: see `{context.command_path} --help`."
    elif isinstance(error, OSError) and error.strerror is not None:
        code, text = WRONG_USAGE, f"{error.filename or 'Writing'}: {error.strerror}"
        text += "; check the path, or choose another." if error.filename else "."
    elif isinstance(error, MemoryError) or re.search(OUT_OF_MEMORY, str(error)):
        code, text = FAILED, f"Out of memory: use smaller batches or texts. ({first_line(error)})"
    else:
        code, text = FAILED, f"{type(error).__name__}: {error} (--debug shows where)"
    if text:  # none where the help was printed instead
        print(f"didi: {' '.join(text.split())}", file=sys.stderr)
    return int(code)

import io
import json
import re

from rich.console import Console

from didi_instruct.training.reporting import RunLog, TerminalReporter


def shown(reporter, act, **console):
    """What a reporter prints of a run of 1000 steps."""
    reporter.console = Console(file=io.StringIO(), **console)
    reporter.start(0, 1000)
    act(reporter)
    reporter.stop()
    return reporter.console.file.getvalue()


def test_a_resumed_log_has_each_step_once(tmp_path):
    log = RunLog(tmp_path)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": float(step)})
    log.close()
    with log.path.open("a") as file:
        file.write('{"step": 4, "lo')  # cut by a kill
    resumed = RunLog(tmp_path, resume_from=2)
    resumed.write({"step": 3, "loss": 30.0})
    resumed.close()
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_without_a_terminal_there_are_plain_lines():
    """Each number in its own format and in the order given; errors beside what they are of."""

    def act(reporter):
        reporter.advance(
            500, {"loss": 1.25, "tokens_per_second": 12345.6, "mfu": 0.456, "lr": 1e-4}
        )
        reporter.measured(500, {"path_kl": 2.0, "path_kl_se": 0.5, "entropy": 1.0})

    lines = shown(TerminalReporter("pretrain"), act, width=200)
    numbers = "loss 1.25  12,346 tokens/s  MFU 46%  lr 0.0001"
    assert re.search(rf"^pretrain: step 500/1000  {numbers}  \d+ s left$", lines, re.MULTILINE)
    assert "step 500: path_kl 2.0000 ± 0.5000  entropy 1.0000\n" in lines


def test_a_narrow_terminal_keeps_counter_and_time_and_drops_numbers():
    """60 columns hold title, bar, counter and time left; of the numbers, those that fit whole."""

    def act(reporter):
        values = {"loss": 1.25, "reward_student": -0.123456, "disc_accuracy": 0.75}
        reporter.advance(500, values)
        reporter.measuring(500)

    reporter = TerminalReporter("distill")
    text = shown(reporter, act, force_terminal=True, width=80, color_system=None)
    lines = [line for line in text.splitlines() if "500/1000" in line]
    assert lines
    for line in lines:
        assert re.search(r"500/1000 +(-|\d)[-:\d]+", line), line
        assert "…" not in line
    assert "loss 1.25" in lines[0]
    assert "disc_accuracy" not in lines[0]
    assert "distill (evaluating)" in lines[-1]

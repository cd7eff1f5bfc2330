import io
import json
import re

from rich.console import Console

from didi_instruct.training.reporting import RunLog, TerminalReporter, readable


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
    reporter = TerminalReporter("pretrain", seconds_between_lines=0.0)
    reporter.console = Console(file=io.StringIO(), width=200)
    reporter.start(0, 10)
    reporter.advance(5, {"loss": 1.25, "tokens_per_second": 12345.6, "mfu": 0.456})
    reporter.stop()
    text = reporter.console.file.getvalue()
    assert "step 5/10" in text
    assert "loss 1.25  12,346 tokens/s  MFU 46%" in text
    assert "s left" in text


def test_on_a_terminal_there_is_a_bar():
    reporter = TerminalReporter("pretrain")
    reporter.console = Console(file=io.StringIO(), force_terminal=True, width=120)
    reporter.start(0, 10)
    reporter.advance(5, {"loss": 1.25})
    reporter.stop()
    text = reporter.console.file.getvalue()
    assert "5/10" in text
    assert "loss 1.25" in text


def test_a_narrow_terminal_keeps_counter_and_time_and_drops_numbers():
    """60 columns hold title, bar, counter and time left; of the numbers, those that fit whole."""
    reporter = TerminalReporter("distill")
    reporter.console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    reporter.start(0, 1000)
    reporter.advance(500, {"loss": 1.25, "reward_student": -0.123456, "disc_accuracy": 0.75})
    reporter.measuring(500)
    reporter.stop()
    lines = [line for line in reporter.console.file.getvalue().splitlines() if "500/1000" in line]
    assert lines
    for line in lines:
        assert re.search(r"500/1000 +(-|\d)[-:\d]+", line), line
        assert "…" not in line
    assert "loss 1.25" in lines[0]
    assert "disc_accuracy" not in lines[0]
    assert "distill (evaluating)" in lines[-1]


def test_numbers_are_shown_in_their_order():
    assert readable({"loss": 2.0, "lr": 1e-4}) == "loss 2  lr 0.0001"

"""The report of an evaluation: a page, Markdown with figures, and a table for the terminal."""

from didi_instruct.evaluation.report.lines import short_names
from didi_instruct.evaluation.report.render import Report

__all__ = ["Report", "short_names"]

"""Jobs and tables of an experiment, for results that are written by hand."""

from didi_instruct.reproduce.lines import Answers


def measuring_jobs(experiment, scale):
    """Jobs of its lines."""
    return [line.job for line in experiment.lines(scale)]


def table_of(experiment, scale, results):
    """The table that it makes of results by key."""
    return experiment.table(scale, Answers(list(experiment.lines(scale)), results))

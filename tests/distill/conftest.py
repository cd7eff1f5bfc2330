import pytest
from tests.random_models import save_random
from tests.runs import distilling

import didi_instruct as didi
from didi_instruct.distillation import bank


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A teacher, and another model that could be one."""
    folder = tmp_path_factory.mktemp("models")
    save_random(folder / "teacher")
    save_random(folder / "other", seed=1)
    return folder


@pytest.fixture
def run(models, tmp_path, monkeypatch):
    """Distil the teacher into tmp_path / name; no picture, which takes longer than a run."""
    monkeypatch.setattr(distilling, "draw_curves", lambda *_, **__: False)

    def start(config, name="run", *, teacher="teacher", **options):
        options = {"device": "cpu"} | options
        teacher = models / teacher if isinstance(teacher, str) else teacher
        return didi.distill(config, teacher=teacher, out=tmp_path / name, **options)

    return start


@pytest.fixture
def draws(monkeypatch):
    """How many texts the bank's sampler is asked for, call by call."""
    asked, draw = [], bank.ancestral

    def counted(denoiser, schedule, state, **options):
        asked.append(len(state.z))
        return draw(denoiser, schedule, state, **options)

    monkeypatch.setattr(bank, "ancestral", counted)
    return asked

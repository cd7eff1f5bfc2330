"""Students that are masked LMs of `transformers`: saved, sampled, guided.

That every method teaches them is shown in `test_methods.py`.
"""

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.models.masked_folders import dplm, esm

import didi_instruct as didi
from didi_instruct.config.model import ScheduleConfig, law_of_lengths
from didi_instruct.errors import UserError
from didi_instruct.hub.export import convert
from didi_instruct.model import Model
from didi_instruct.models.discriminator import Discriminator
from didi_instruct.models.masked_lm import load_masked_lm
from didi_instruct.models.masked_lm_writing import save_masked_lm
from didi_instruct.models.network import Mixture, all_logits
from didi_instruct.process.schedule import make_schedule
from didi_instruct.sampling.guide import DiscriminatorGuide
from didi_instruct.sampling.state import Reads

from .small import make_task, run

METHODS = ("didi", "token-matching", "mixture", "sdtt", "dimo")
CHANGES = {
    "discriminator": {"trainable_blocks": None},
    "mixture": {"codes": 3, "spread": 0.3},
    "train": {"batch_size": 8},
}
CODES = {"mixture": 3}
every_method = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """2 layers of width 32, 33 tokens."""
    path = tmp_path_factory.mktemp("esm")
    esm(path, hidden_size=32, intermediate_size=48)
    return path


def task_of(method, folder, seed=1, **changes):
    """A task of two random ESMs of which one is a little off the other."""
    teacher, student = (load_masked_lm(folder).model for _ in range(2))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.03)
    return make_task(method, CHANGES | changes, teacher=teacher, student=student)


@every_method
def test_a_student_is_saved_loaded_and_sampled_in_its_own_layout(method, folder, tmp_path):
    """As `transformers` writes it: the same names, the network's own logits, our own samples."""
    task, tokenizer = (
        task_of(method, folder, mixture={"codes": 1}),
        load_masked_lm(folder).tokenizer,
    )
    run(task, 2)
    with task.distillation.student.averaged() as student, torch.no_grad():
        save_masked_lm(student, tokenizer, tmp_path / "student")
        text = torch.tensor([[5, 33, 20, 33, 33, 9]])
        expected = student(text)
        direct = Model(student, student.config, tokenizer)
        samples = direct.generate(num=3, steps=4, seed=1)
    model = didi.load(tmp_path / "student")
    assert torch.equal(model.network(text), expected)
    assert model.generate(num=3, steps=4, seed=1) == samples
    assert all(set(sample) <= set("ACDEFGHIKLMNOPQRSTUVWY") for sample in samples)
    theirs, report = transformers.EsmForMaskedLM.from_pretrained(
        tmp_path / "student", output_loading_info=True
    )
    assert not report["missing_keys"] | report["unexpected_keys"] | report["mismatched_keys"]
    framed = torch.tensor([[0, 5, 32, 20, 32, 32, 9, 2]])
    with torch.no_grad():
        logits = theirs.eval()(input_ids=framed).logits[:, 1:-1, 4:24]
    torch.testing.assert_close(logits, expected[..., 4:24], atol=1e-5, rtol=0)
    back = convert(tmp_path / "student", tmp_path / "back", "esm")
    there, here = (load_file(path / "model.safetensors") for path in (folder, back))
    assert {n: t.shape for n, t in there.items()} == {n: t.shape for n, t in here.items()}
    changed = {name for name, tensor in there.items() if not torch.equal(tensor, here[name])}
    assert changed == {n for n in there if "contact_head" not in n and "inv_freq" not in n}
    assert "esm.encoder.layer.1.attention.LayerNorm.weight" in here, "as in public files"
    with pytest.raises(UserError, match="not empty"):
        save_masked_lm(task.distillation.student.network, tokenizer, tmp_path / "student")


def test_a_student_with_several_masks_is_sampled_and_has_no_place_in_its_layout(folder, tmp_path):
    task, tokenizer = task_of("mixture", folder), load_masked_lm(folder).tokenizer
    run(task, 2)
    with task.distillation.student.averaged() as student:
        model = Model(student, student.config, tokenizer)
        assert student.vectors.shape == (36, 32)
        assert len(set(model.generate(num=5, steps=3, seed=1))) == 5
        with pytest.raises(UserError, match="has one mask, and the model 3"):
            save_masked_lm(student, tokenizer, tmp_path / "student")


def test_tilting_sees_what_tokens_would_get(folder):
    """The guide's gradient at soft tokens, beside ESM's embeddings written out by hand.

    Masks are zero and the rest is scaled, soft tokens included; they count as visible.
    """
    torch.manual_seed(0)
    critic = Discriminator.from_network(load_masked_lm(folder, dtype=torch.float64).model)
    critic = critic.double().eval()
    z = torch.tensor([[5, 33, 20, 33, 33, 9], [33, 33, 7, 8, 33, 4]])
    at = torch.tensor([1, 3, 6, 10])  # position 4 of the first text and 1 of the second stay masks
    vectors = torch.randn(len(at), 32, dtype=torch.float64)
    counted = z == 33
    guide = DiscriminatorGuide(critic, make_schedule(ScheduleConfig(eps=1e-3)))
    found = guide.gradient(Reads(z), 0.5, Mixture(at, vectors), counted)

    network = critic.trunk.network.esm
    soft = vectors.clone().requires_grad_()
    words = network.embeddings.word_embeddings.weight.detach()
    shown = torch.where((z == 33)[..., None], 0.0, words[z.clamp(max=32)]).flatten(0, 1)
    shown = shown.index_copy(0, at, soft).view(2, 6, 32)
    cls, eos = words[0].expand(2, 1, 32), words[2].expand(2, 1, 32)
    x = torch.cat([cls, shown, eos], 1) * 0.88 / (1 - 1 / 8)  # a mask of 8 tokens is left in each
    hidden = network(inputs_embeds=x)[0][:, 1:-1]
    (critic.log_ratio(hidden) * counted).sum().backward()
    assert soft.grad.abs().sum(-1).min() > 1e-6
    torch.testing.assert_close(found, soft.grad, rtol=1e-9, atol=1e-12)


def test_soft_tokens_in_a_window_are_scaled_as_their_text_alone(tmp_path):
    """Logits of a student in windows beside those of `transformers`, ESM's rescaling by hand.

    Texts of 6 and 4 tokens in windows of 8: what is behind counts neither as text nor as visible.
    Dropout of 0.1 in config.json is off.
    """
    dplm(tmp_path / "dplm")
    network = load_masked_lm(tmp_path / "dplm", dtype=torch.float64).model
    network.config = replace(network.config, end_id=2, lengths=law_of_lengths("4-8", 32))
    task = make_task("didi", CHANGES, teacher=network, student=copy.deepcopy(network))
    student = task.distillation.student.network
    assert student.network.config.hidden_dropout_prob == 0.1
    theirs = transformers.EsmForMaskedLM.from_pretrained(tmp_path / "dplm", dtype=torch.float64)
    z = torch.tensor([[5, 33, 20, 33, 33, 9, 2, 2], [33, 33, 7, 8, 2, 2, 2, 2]])
    at = torch.tensor([1, 4, 9])
    torch.manual_seed(0)
    vectors = torch.randn(3, 32, dtype=torch.float64)
    with torch.no_grad():
        hard, soft = all_logits(student, z), all_logits(student, z, mixture=Mixture(at, vectors))
    words = theirs.esm.embeddings.word_embeddings.weight.detach()
    for row, size in ((0, 6), (1, 4)):
        ids = z[row, :size].masked_fill(z[row, :size] == 33, 32)
        framed = torch.cat([torch.tensor([0]), ids, torch.tensor([2])])
        with torch.no_grad():
            expected = theirs.eval()(input_ids=framed[None]).logits[0, 1:-1, 4:24]
        torch.testing.assert_close(hard[row, :size, 4:24], expected, atol=1e-10, rtol=0)
        shown = words[framed].masked_fill((framed == 32)[:, None], 0.0)
        mine = at[at // 8 == row] % 8
        shown[1 + mine] = vectors[at // 8 == row]
        masks = int((framed == 32).sum()) - len(mine)
        shown = shown * (1 - 0.15 * 0.8) / (1 - masks / len(framed))
        with torch.no_grad():
            expected = theirs(inputs_embeds=shown[None]).logits[0, 1:-1, 4:24]
        torch.testing.assert_close(soft[row, :size, 4:24], expected, atol=1e-6, rtol=0)
        assert (soft[row, :size, 4:24] - hard[row, :size, 4:24]).abs().min() > 1e-6


def test_guided_samples_are_text(folder):
    """RGAS of an ESM under a discriminator on an ESM: tilting moves the draws."""
    loaded = load_masked_lm(folder)
    torch.manual_seed(0)
    critic = Discriminator.from_network(loaded.model).eval()
    model = Model(loaded.model, loaded.config, loaded.tokenizer, critic)
    plain, guided = (
        model.draw(8, steps=4, length=10, seed=1, sampler=sampler)
        for sampler in ("ancestral", "rgas")
    )
    assert guided.disc_calls > 0
    assert (guided.tokens != plain.tokens).any()
    assert set(guided.tokens.unique().tolist()) <= set(range(33)) - set(loaded.model.ids.banned)

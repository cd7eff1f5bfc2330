"""ESMFold is found, checked and read without running anything, and folds as transformers does."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import EsmForProteinFolding
from transformers.models.esm.openfold_utils import residue_constants

from didi_instruct.errors import UserError
from didi_instruct.proteins.folding_model import load_folding, open_folding, predict
from didi_instruct.proteins.structures import ATOMS, RESIDUE_ORDER, THREE_LETTERS


@pytest.fixture
def copy(folding, tmp_path):
    return shutil.copytree(folding[0], tmp_path / "copy")


def edit(folder, change):
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings))


def refusal(source):
    with pytest.raises(UserError) as error:
        open_folding(source)
    text = str(error.value)
    assert "\n" not in text
    return text


def mean_plddt(output, row):
    """The formula of fair-esm's `mean_plddt`, on what transformers returns."""
    exists = output["atom37_atom_exists"][row].double()
    return float(100 * (output["plddt"][row].double() * exists).sum() / exists.sum())


def test_names_are_those_of_openfold():
    assert list(RESIDUE_ORDER) == residue_constants.restypes
    assert list(ATOMS) == residue_constants.atom_types
    assert residue_constants.restype_1to3 == THREE_LETTERS


@pytest.mark.parametrize("extra", ["", "XUZ"])
def test_predictions_are_those_of_transformers(folding, chains, extra):
    """A padded batch read by us against `infer` of each chain alone, letters it knows not too."""
    folder, theirs = folding
    sequences = [chain + extra for chain in chains]
    ours = predict(load_folding(open_folding(folder), "cpu", False), sequences)
    for structure, sequence in zip(ours, sequences, strict=True):
        alone = theirs.infer(sequence)
        assert structure.mean_plddt == pytest.approx(mean_plddt(alone, 0), abs=1e-4)
        np.testing.assert_allclose(structure.plddt, 100 * alone["plddt"][0], atol=1e-2)
        assert (structure.exists == alone["atom37_atom_exists"][0].bool().numpy()).all()
        assert structure.exists[-1].any() == (not extra)
        # Distances within a chain, not positions: rounding grows through the passes.
        atoms = EsmForProteinFolding.output_to_pdb(alone)[0].splitlines()
        theirs_at = [[float(a[s : s + 8]) for s in (30, 38, 46)] for a in atoms if a[:4] == "ATOM"]
        np.testing.assert_allclose(structure.positions[structure.exists], theirs_at, atol=2e-2)


def test_confidences_of_the_random_model_differ(folding, chains):
    """Else the tests above would compare constants."""
    structures = predict(folding[1], chains)
    means = [structure.mean_plddt for structure in structures]
    assert np.ptp(means) > 0.5
    assert np.ptp(structures[0].plddt[structures[0].exists]) > 20


def test_recycles_count_passes_after_the_first(folding, chains):
    """`max_recycles` of the file is 2 passes: one recycle is the default, none is not."""
    files = open_folding(folding[0])
    network = load_folding(files, "cpu", False)
    default, one, none = (predict(network, chains[:1], n)[0].plddt for n in (None, 1, 0))
    assert files.passes == 2
    assert (default == one).all()
    assert np.abs(default - none).max() > 1e-3


def test_the_language_model_in_bfloat16_is_close(folding, chains):
    files = open_folding(folding[0])
    plain, half = (predict(load_folding(files, "cpu", bf16), chains) for bf16 in (False, True))
    networks = load_folding(files, "cpu", True)
    assert {p.dtype for p in networks.esm.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in networks.trunk.parameters()} == {torch.float32}
    for one, other in zip(plain, half, strict=True):
        assert one.mean_plddt != other.mean_plddt
        assert one.mean_plddt == pytest.approx(other.mean_plddt, abs=0.5)


def test_a_pickle_with_a_language_model_in_fp16_is_read(copy, folding, chains):
    """As esmfold_v1 comes: pytorch_model.bin, frequencies in each layer, `fp16_esm` or not."""
    weights = load_file(copy / "model.safetensors")
    frequencies = weights.pop("esm.rotary_embeddings.inv_freq")
    name = "esm.encoder.layer.{}.attention.self.rotary_embeddings.inv_freq"
    weights |= {name.format(n): frequencies.clone() for n in range(2)}
    weights["esm.embeddings.position_ids"] = torch.arange(1026)[None]
    weights = {n: t.half() if n.startswith("esm.") and t.ndim else t for n, t in weights.items()}
    (copy / "model.safetensors").unlink()
    torch.save(weights, copy / "pytorch_model.bin")
    edit(copy, lambda settings: settings["esmfold_config"].update(fp16_esm=True))
    network = load_folding(open_folding(copy), "cpu", False)
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    for ours, theirs in zip(predict(network, chains), predict(folding[1], chains), strict=True):
        assert ours.mean_plddt == pytest.approx(theirs.mean_plddt, abs=0.05)


def test_weights_in_several_files_are_read(copy, folding, chains):
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = {n: f"part-{len(n) % 2}.safetensors" for n in weights}
    for part in set(names.values()):
        save_file({n: t for n, t in weights.items() if names[n] == part}, copy / part)
    index = json.dumps({"weight_map": names})
    (copy / "model.safetensors.index.json").write_text(index)
    files = open_folding(copy)
    before = files.fingerprint()
    found, expected = (
        predict(network, chains[:1])[0].plddt
        for network in (load_folding(files, "cpu", False), folding[1])
    )
    assert (found == expected).all()
    weights["lm_head.bias"] += 1
    part = names["lm_head.bias"]
    save_file({n: t for n, t in weights.items() if names[n] == part}, copy / part)
    assert open_folding(copy).fingerprint() != before


def test_a_pickle_is_not_run(copy, tmp_path):
    class Harm:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harmed"),)

    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    torch.save(weights | {"more": Harm()}, copy / "pytorch_model.bin")
    load_folding(open_folding(copy), "cpu", False)
    assert not (tmp_path / "harmed").exists()


def test_sources_without_folding_weights_are_refused(copy, tmp_path):
    assert "no folding weights there" in refusal("not/a/place")
    assert "is a file" in refusal(copy / "config.json")
    (tmp_path / "empty").mkdir()
    assert "names no architecture" in refusal(tmp_path / "empty")
    (copy / "model.safetensors").unlink()
    assert "model.safetensors" in refusal(copy)


def test_another_model_is_refused(copy):
    edit(copy, lambda settings: settings.update(architectures=["EsmForMaskedLM"]))
    assert "EsmForMaskedLM" in refusal(copy)
    edit(copy, lambda s: s.update(architectures=["EsmForProteinFolding"], auto_map={"a": "b"}))
    assert "code of its own" in refusal(copy)


def test_weights_that_do_not_fit_the_settings_are_refused(copy):
    edit(copy, lambda settings: settings.update(hidden_size=32))
    assert "of the wrong shape" in refusal(copy)
    edit(copy, lambda settings: settings.update(hidden_size=16))
    weights = load_file(copy / "model.safetensors")
    save_file(
        {n: t for n, t in weights.items() if n != "lddt_head.3.bias"}, copy / "model.safetensors"
    )
    assert "1 tensor missing (lddt_head.3.bias)" in refusal(copy)
    integers = weights | {"lddt_head.3.bias": weights["lddt_head.3.bias"].to(torch.int8)}
    save_file(integers, copy / "model.safetensors")
    assert "quantised" in refusal(copy)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("num_hidden_layers",), 10**9),
        (("esmfold_config", "trunk", "num_blocks"), 10**9),
        (("esmfold_config", "trunk", "max_recycles"), 10**9),
        (("esmfold_config", "trunk", "structure_module", "num_resnet_blocks"), True),
        (("max_position_embeddings",), 10**12),
        (("vocab_list",), ["<cls>"]),
        (("esmfold_config",), None),
    ],
)
def test_settings_that_ask_for_too_much_are_refused(copy, place, value):
    def change(settings):
        *path, last = place
        for name in path:
            settings = settings[name]
        settings[last] = value

    edit(copy, change)
    assert "config.json: `" in refusal(copy)


def test_settings_that_run_code_are_left_out(copy):
    """Attention kernels are fetched from the hub and run by transformers if a file names them."""
    edit(copy, lambda s: s.update(attn_implementation="someone/kernel", quantization_config={}))
    network = load_folding(open_folding(copy), "cpu", False)
    assert network.config._attn_implementation == "eager"

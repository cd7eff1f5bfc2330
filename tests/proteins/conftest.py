import numpy as np
import pytest

from didi_instruct.proteins.folding_model import write_random_folding
from didi_instruct.proteins.structures import RESIDUE_ORDER


@pytest.fixture(scope="session")
def folding(tmp_path_factory):
    """A folder with a tiny random folding model, and the network of transformers in it."""
    folder = tmp_path_factory.mktemp("folding")
    return folder, write_random_folding(folder)


@pytest.fixture(scope="session")
def chains():
    """Random chains of 5 to 40 residues."""
    rng = np.random.default_rng(3)
    lengths = (40, 17, 17, 5, 33, 26)
    return ["".join(rng.choice([*RESIDUE_ORDER], length)) for length in lengths]

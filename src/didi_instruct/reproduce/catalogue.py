"""All items."""

from collections.abc import Mapping

from didi_instruct.reproduce.items import Item
from didi_instruct.reproduce.items_ablations import ABLATION_ITEMS
from didi_instruct.reproduce.items_baselines import BASELINE_ITEMS
from didi_instruct.reproduce.items_downstream import DOWNSTREAM_ITEMS
from didi_instruct.reproduce.items_generation import GENERATION_ITEMS
from didi_instruct.reproduce.items_guidance import GUIDANCE_ITEMS
from didi_instruct.reproduce.items_measures import MEASURE_ITEMS
from didi_instruct.reproduce.items_proteins import PROTEIN_ITEMS
from didi_instruct.reproduce.items_reference import REFERENCE_ITEMS

ITEMS: Mapping[str, Item] = {
    item.name: item
    for item in (
        *GENERATION_ITEMS,
        *ABLATION_ITEMS,
        *REFERENCE_ITEMS,
        *MEASURE_ITEMS,
        *GUIDANCE_ITEMS,
        *BASELINE_ITEMS,
        *DOWNSTREAM_ITEMS,
        *PROTEIN_ITEMS,
    )
}

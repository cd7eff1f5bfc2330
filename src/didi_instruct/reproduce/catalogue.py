"""All items: what is made, and what is planned."""

from collections.abc import Mapping

from didi_instruct.reproduce.items import Item
from didi_instruct.reproduce.items_ablations import ABLATION_ITEMS
from didi_instruct.reproduce.items_baselines import BASELINE_ITEMS
from didi_instruct.reproduce.items_downstream import DOWNSTREAM_ITEMS
from didi_instruct.reproduce.items_generation import GENERATION_ITEMS
from didi_instruct.reproduce.items_guidance import GUIDANCE_ITEMS
from didi_instruct.reproduce.items_measures import MEASURE_ITEMS
from didi_instruct.reproduce.items_reference import REFERENCE_ITEMS

PLANNED = (
    Item(
        name="proteins",
        title="Protein sequences: pLDDT and diversity",
        where="Section 4.5 and its appendix",
        planned="pLDDT needs a structure predictor (ESMFold) and clusters need MMseqs2: neither is "
        "part of didi.",
    ),
)

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
        *PLANNED,
    )
}

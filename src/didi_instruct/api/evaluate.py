"""Evaluation of a model by SOURCE on data by SOURCE."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from didi_instruct.data.files import write_atomic
from didi_instruct.evaluation.describing import complete
from didi_instruct.evaluation.provenance import versions


@dataclass(frozen=True, slots=True)
class Report:
    """What `didi eval --json` writes."""

    model: str
    judge: str | None
    rows: list[dict[str, Any]]
    reference: dict[str, Any] = field(default_factory=dict)
    baseline: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the model that `rows` are compared with."""

    def write(self, path: Path) -> None:
        """Write JSON, with the versions behind the numbers."""
        value = {
            "model": self.model,
            "judge": self.judge,
            "rows": [complete(row) for row in self.rows],
            "baseline": [complete(row) for row in self.baseline],
            "reference": self.reference,
            "versions": versions(),
        }
        write_atomic(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())

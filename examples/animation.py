"""Draw the animation of the README: a student and its teacher write a story in as many steps.

    python examples/animation.py            # docs/stories.gif, from the shipped models

Both get the same seed, so they write the same places at the same time: the first seed, not the
best. `didi generate --trace story.gif` draws one model alone.
"""

import argparse
from pathlib import Path
from typing import Any

import didi_instruct as didi
from didi_instruct.data.files import write_atomic
from didi_instruct.errors import UserError
from didi_instruct.sampling.trace import Trace, check_path
from didi_instruct.sampling.trace_gif import render_beside

MOST_BYTES = 2 << 20
"""What a page should ask its readers to fetch for one picture."""


def traced(model: didi.Model, steps: int, length: int, seed: int) -> dict[str, Any]:
    """Draw one story and keep every step of it."""
    if model.tokenizer is None:
        raise UserError("The animation shows words: give a model with a tokenizer.")
    trace = Trace(model.mask_symbol, model.tokenizer.eot_id, keep=1)
    model.draw(1, steps=steps, length=length, seed=seed, measure_path=False, callback=trace)
    return trace.as_dict(model.tokenizer.decode)


def main() -> None:
    """Load, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--student", default="stories")
    parser.add_argument("--teacher", default="stories/teacher")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--teacher-steps", type=int, help="as many as the student's if not said")
    parser.add_argument("--length", type=int, default=120, help="tokens of the stories")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/stories.gif"))
    asked = parser.parse_args()
    try:
        check_path(asked.out)
        slow = asked.teacher_steps or asked.steps
        shown = {
            f"student, {asked.steps} steps": (asked.student, asked.steps),
            f"teacher, {slow} steps": (asked.teacher, slow),
        }
        traces = {
            title: traced(didi.load(source, device="cpu"), steps, asked.length, asked.seed)
            for title, (source, steps) in shown.items()
        }
    except UserError as error:
        parser.error(str(error))
    picture = render_beside(traces)
    if len(picture) > MOST_BYTES:
        parser.error(f"{asked.out} would have {len(picture):,} bytes: use fewer steps.")
    write_atomic(asked.out, picture)
    print(f"Wrote {asked.out} ({len(picture):,} bytes)")


if __name__ == "__main__":
    main()

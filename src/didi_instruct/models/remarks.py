"""What is told to the user once, in one line."""

import functools
import logging

remarks: list[str] = []
"""What was said so far: who measures has to repeat it beside the numbers."""


@functools.cache
def say_once(text: str) -> None:
    """Tell the user something that need not be told again."""
    remarks.append(text)
    logging.getLogger("didi_instruct").warning(text)

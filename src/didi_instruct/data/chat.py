"""Conversations as prompts, where a model's tokenizer says how to write them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from didi_instruct.errors import UserError

FILE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"


class ChatTemplate:
    """A template in the form of `transformers`, run in a sandbox."""

    def __init__(self, source: str, tokens: dict[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UserError(f"The chat template cannot be read ({error}): mend it.") from error
        self._tokens = tokens

    def prompt(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt that a conversation is: messages with `role` and `content`."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._tokens
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise UserError(
                f"The model's chat template does not take these messages ({error})."
            ) from error


def find_chat_template(source: str | Path) -> ChatTemplate | None:
    """The template in a model's folder; None where it has none, and for models by other names."""
    folder = Path(source)
    config: Any = {}
    if (folder / CONFIG).is_file():
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    found = config.get("chat_template")
    if (folder / FILE).is_file():
        found = (folder / FILE).read_text(encoding="utf-8")
    if isinstance(found, list):  # several by name
        found = {one["name"]: one["template"] for one in found}.get("default")
    if not isinstance(found, str):
        return None
    tokens = {name: _content(config.get(name)) for name in ("bos_token", "eos_token", "unk_token")}
    return ChatTemplate(found, tokens)


def _content(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _refuse(message: str) -> None:
    raise TemplateError(message)

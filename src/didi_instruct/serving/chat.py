"""Conversations that clients send, as prompts."""

from collections.abc import Sequence

from didi_instruct.data.chat import ChatTemplate
from didi_instruct.errors import UserError
from didi_instruct.serving.api_errors import wrong
from didi_instruct.serving.schemas import Message

LONGEST = 1 << 20
"""Characters of a prompt that a template may make."""


def chat_prompt(template: ChatTemplate, messages: Sequence[Message]) -> str:
    """The prompt that a conversation is; what cannot be one is refused by the API's error."""
    try:
        text = template.prompt([message.model_dump(exclude_none=True) for message in messages])
    except UserError as error:
        raise wrong(str(error), "messages") from error
    if len(text) > LONGEST:
        raise wrong("The conversation is too long.", "messages")
    return text

"""Bodies of requests, checked: a parameter that is not supported is refused by name."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

MOST_STEPS = 1024
MOST_TEXTS = 64
LARGEST_SEED = 2**63 - 1
LARGEST_OPTION = 10**6

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "function_call": (None,),
    "functions": (None,),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "metadata": (None,),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None,),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None,),
    "store": (None, False),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "user": (None,),
}
"""OpenAI's parameters that are not supported, with the values that ask for nothing."""


def _encodable(text: str) -> str:
    """Refuse half a character, which JSON can write and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("half_a_character", "it holds half a character") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Stop = Annotated[Text, StringConstraints(min_length=1, max_length=200)]
Whole = Annotated[int, Field(ge=-LARGEST_OPTION, le=LARGEST_OPTION)]
Number = Annotated[float, Field(ge=-LARGEST_OPTION, le=LARGEST_OPTION)]
Option = (
    bool | Whole | Number | Text | None | Annotated[list[Number], Field(max_length=MOST_STEPS + 1)]
)


class Body(BaseModel):
    """A body without surprises: no other fields, no type in place of another."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, neutral in NEUTRAL.items():
            if name in data and data[name] not in neutral:
                raise PydanticCustomError(
                    "unsupported", "`{name}` is not supported: leave it out.", {"name": name}
                )
        return {name: value for name, value in data.items() if name not in NEUTRAL}


class StreamOptions(Body):
    """OpenAI's `stream_options`."""

    include_usage: bool = False


class Sampling(Body):
    """How texts are drawn; the names are those of `didi generate` where OpenAI has none."""

    model: Text | None = Field(None, description="Id of a served model; the first if not said.")
    n: int = Field(1, ge=1, le=MOST_TEXTS, description="Texts (of each prompt).")
    seed: int = Field(0, ge=0, le=LARGEST_SEED, description="The same seed gives the same text.")
    temperature: float = Field(1.0, ge=0, le=100, description="0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=1, le=2**31)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = Field(
        None, description="The text ends before the first of these."
    )
    stream: bool = Field(False, description="Server-sent events, ended by `[DONE]`.")
    stream_options: StreamOptions | None = None
    steps: int | None = Field(None, ge=1, le=MOST_STEPS, description="Denoising steps; 16.")
    sampler: Text | None = Field(None, description="By default the plain one of the model's kind.")
    options: Annotated[dict[Text, Option], Field(max_length=32)] = Field(
        default_factory=dict, description="Settings of the sampler."
    )
    judge: Text | None = Field(None, description="A served model that measures the perplexity.")

    @property
    def stops(self) -> list[str]:
        """Texts that end a text."""
        return [self.stop] if isinstance(self.stop, str) else (self.stop or [])

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class Completion(Sampling):
    """Body of `/v1/completions`."""

    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=MOST_TEXTS)] = Field(
        "", description="Text to continue, or several."
    )
    suffix: Text | None = Field(None, description="Text to end with.")
    max_tokens: int | None = Field(
        None, ge=1, description="Tokens to write, at most as many as the model's window has room."
    )
    echo: bool = Field(False, description="Return the whole text, as `didi generate` does.")
    diffusing: bool = Field(False, description="With `stream`: an event for each step.")


class Infill(Sampling):
    """Body of `/v1/infill`."""

    text: Text = Field(description="Text with `___` where something is to be written.")
    gap: Annotated[Text, StringConstraints(max_length=200)] | None = Field(
        None,
        description="Tokens of a gap: `8`, `4-12`, `auto` (the default) or `auto:4-12`; "
        "`20,30-40` for the first and the second.",
    )
    diffusing: bool = Field(False, description="With `stream`: an event for each step.")


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text
    name: Text | None = None


class Chat(Sampling):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=256)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)


class Tokenize(Body):
    """Body of `/tokenize`."""

    model: Text | None = None
    text: Text


class ErrorDetail(BaseModel):
    """Description of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    """An error, in OpenAI's form."""

    error: ErrorDetail

"""Settings of `didi bench`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from didi_instruct.config.model import ModelConfig, architecture
from didi_instruct.config.schema import Help, parse
from didi_instruct.errors import Argument, UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """Settings of a benchmark; `model` overrides settings of the architecture."""

    source: Annotated[
        str | None,
        Help(
            "The model: a shipped name (`stories`), a folder, a foreign checkpoint, a Hugging Face "
            "id.",
            positional=True,
        ),
    ] = None
    arch: Annotated[str | None, Help("A named architecture with random weights instead.")] = None
    model: Annotated[
        Mapping[str, Any],
        Help("Change a setting of --arch: layers=4.", flag="--set", metavar="KEY=VALUE"),
    ] = field(default_factory=dict)
    against: Annotated[
        tuple[str, ...],
        Help(
            "Further rows: plain (neither compiled nor captured), naive, ar, transformers, other "
            "models; separated by commas."
        ),
    ] = ()
    batch: Annotated[int, Help("Texts at once.")] = 16
    length: Annotated[int | None, Help("Tokens per text; by default the model's window.")] = None
    steps: Annotated[int | None, Help("Steps per text; by default as in didi generate.")] = None
    sampler: Annotated[str | None, Help("As in didi generate.")] = None
    guided: Annotated[
        bool, Help("Sample by RGAS, for --arch with a discriminator of random weights.")
    ] = False
    repeat: Annotated[int, Help("Timed runs of each row.")] = 5
    fast: Annotated[bool | None, Help("Compile and capture; by default on a GPU.")] = None
    dtype: Annotated[
        str | None, Help("float32 or bfloat16; by default bfloat16 on a GPU, else float32.")
    ] = None
    device: Annotated[str | None, Help("cpu, cuda, cuda:N.")] = None

    def __post_init__(self) -> None:
        """Refuse settings that cannot be timed."""
        if (self.source is None) == (self.arch is None):
            raise UserError("Give a model or {}, one of the two.", Argument("arch", "NAME"))
        if self.model and self.arch is None:
            raise UserError("--set changes an architecture: use it with {}.", Argument("arch"))
        for name in ("batch", "length", "steps", "repeat"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError("{} is {}: use 1 or more.", Argument(name), value)
        if self.guided and self.sampler not in (None, "rgas"):
            sampler = Argument("sampler", self.sampler)
            raise UserError("{} samples by rgas: leave out {}.", Argument("guided"), sampler)

    @property
    def row(self) -> str:
        """Name of the first row."""
        return self.source or str(self.arch)

    @property
    def name(self) -> str:
        """Name of the model in a report."""
        return self.source or f"{self.arch} with random weights"

    @property
    def wanted_sampler(self) -> str | None:
        """Name of the sampler; None: each model's default."""
        return "rgas" if self.guided else self.sampler

    @property
    def architecture(self) -> ModelConfig:
        """The architecture with its changed settings, and room for `length`."""
        assert self.arch is not None
        config = architecture(self.arch)
        if self.model:
            names = ("layers", "hidden", "heads", "vocab_size")
            shape = {name: getattr(config, name) for name in names}
            config = parse(ModelConfig, {**shape, **self.model}, where="--set")
        if self.length is not None and self.length > config.length:
            config = replace(config, length=self.length)
        return config

    def at(self, name: str, value: int) -> "BenchConfig":
        """Return these settings at one point of a sweep."""
        if name == "vocabulary":
            return replace(self, model={**self.model, "vocab_size": value + 1})
        changes: dict[str, Any] = {name: value}
        return replace(self, **changes)

"""When a distillation has gone wrong, and why: named causes, from the numbers of the log."""

from collections.abc import Callable, Mapping

from didi_instruct.distillation.task import ENOUGH_TEXTS, StudentTask

HALF = 0.5
"""Share of steps above which something happens mostly."""
HOLD = {
    "didi": "didi.kl_weight",
    "token-matching": "token_matching.anchor",
    "dimo": "dimo.random",
}
"""What holds a student back: the weight of the KL to the teacher, the chance in its start."""

COLLAPSES = {
    "path_entropy": ("entropy", "nats per token"),
    "unique_4gram": ("variety", "of the 4-grams distinct"),
}
"""What is said to collapse, by `shows_variety`, and what it is counted in."""


class Watcher:
    """Sees every log entry: warns once of each trouble, and stops a run that has collapsed."""

    def __init__(self, task: StudentTask, say: Callable[[str], None]) -> None:
        self.task, self.say = task, say
        self._said: set[str] = set()
        self._step: int | None = None
        self._texts, self._variety = 0, 0.0

    def __call__(self, step: int, values: Mapping[str, float]) -> str | None:
        """Return why training must stop, or None."""
        if values.get("disc_waits", 0.0) > HALF:
            self._warn(
                "saturated",
                f"step {step}: the discriminator is saturated (right at "
                f"{values['disc_sharpness']:.0%} of positions), so it waits for the student. If "
                "that lasts: lower discriminator.lr, or raise didi.rollout_steps or optim.lr.",
            )
        if values.get("at_chance", 0.0) > HALF:
            self._warn(
                "chance",
                f"step {step}: the discriminator is at chance (accuracy "
                f"{values['disc_accuracy']:.2f}), so the student waits. If that lasts: raise "
                "discriminator.lr, discriminator.steps or discriminator.trainable_blocks.",
            )
        name = self.task.shows_variety
        if name not in values:  # a method that draws nothing
            return None
        self._average(step, values[name])
        return self._collapse(step)

    def _average(self, step: int, variety: float) -> None:
        """Take that of the texts since the last entry into an average that forgets."""
        size = self.task.config.train.batch_size
        texts = size * (1 if self._step is None else step - self._step)
        self._step, self._texts = step, self._texts + texts
        weight = texts / min(self._texts, max(ENOUGH_TEXTS, texts))
        self._variety += weight * (variety - self._variety)

    def _collapse(self, step: int) -> str | None:
        """Compare averages of many texts: the entropy of a few swings by more than half."""
        config, start = self.task.config, float(self.task.variety_at_start)
        known = self._texts >= ENOUGH_TEXTS and step > config.warmup
        if not known or self._variety >= config.watch.min_entropy * start:
            return None
        what, unit = COLLAPSES[self.task.shows_variety]
        return (
            f"{what} collapse, {self._variety:.3g} {unit} where it began with {start:.3g}. Try a "
            f"lower optim.lr or a higher {HOLD[config.method]}; watch.min_entropy=0 lets it go on."
        )

    def _warn(self, cause: str, text: str) -> None:
        if cause not in self._said:
            self._said.add(cause)
            self.say(text)

"""When a distillation has gone wrong, and why: named causes, from the numbers of the log."""

from collections.abc import Callable, Mapping

from didi_instruct.distillation.task import DistillTask

HALF = 0.5


class Watcher:
    """Sees every log entry: warns once of each trouble, and stops a run that has collapsed."""

    def __init__(self, task: DistillTask, say: Callable[[str], None]) -> None:
        self.task, self.say = task, say
        self._said: set[str] = set()

    def __call__(self, step: int, values: Mapping[str, float]) -> str | None:
        """Return why training must stop, or None."""
        config = self.task.config
        if values.get("disc_waits", 0.0) > HALF:
            self._warn(
                "saturated",
                f"step {step}: the discriminator is saturated (accuracy "
                f"{values['disc_accuracy']:.2f}), so it waits for the student. If that lasts: "
                "lower discriminator.lr, or raise didi.rollout_steps or optim.lr.",
            )
        if values.get("at_chance", 0.0) > HALF:
            self._warn(
                "chance",
                f"step {step}: the discriminator is at chance (accuracy "
                f"{values['disc_accuracy']:.2f}), so the student waits. If that lasts: raise "
                "discriminator.lr, discriminator.steps or discriminator.trainable_blocks.",
            )
        start, least = float(self.task.entropy_at_start), config.watch.min_entropy
        now = values["path_entropy"]
        if now < least * start:
            return (
                f"entropy collapse, {now:.3g} nats per token where it began with {start:.3g}. "
                "Try a lower optim.lr or a stronger KL to the teacher (didi.kl_weight, "
                "token_matching.anchor); watch.min_entropy=0 lets it go on."
            )
        return None

    def _warn(self, cause: str, text: str) -> None:
        if cause not in self._said:
            self._said.add(cause)
            self.say(text)

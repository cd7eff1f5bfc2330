"""Numbers for Prometheus: requests, queue, passes and how full they are, times."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from didi_instruct.serving.jobs import Done

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.01, 0.03, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
_POWERS = tuple(2**k for k in range(15))


class Metrics:
    """Counters of an engine and a server, by model; an `Observer` of the engine."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        by = ["model"]

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"didi_{name}", text, [*by, *labels], registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"didi_{name}", text, by, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests that are over, by outcome.", "outcome")
        self.passes = counter("passes", "Forward passes of the denoiser.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens that were given.")
        self.written = counter("generation_tokens", "Tokens that were written.")
        self.pass_requests = histogram("pass_requests", "Requests in a pass.", _POWERS)
        self.pass_texts = histogram("pass_texts", "Texts that a pass read.", _POWERS)
        self.pass_tokens = histogram("pass_tokens", "Tokens drawn from a pass.", (0, *_POWERS))
        self.pass_seconds = histogram("pass_seconds", "Time of a pass.", _SECONDS)
        self.nfe = histogram("request_nfe", "Steps of the denoiser of a request.", _POWERS)
        self.first = histogram("first_canvas_seconds", "Until a request's first step.", _SECONDS)
        self.last = histogram("last_canvas_seconds", "Until a request's texts.", _SECONDS)
        self.waiting = Gauge("didi_requests_waiting", "Requests here.", registry=registry)
        self.responses = Counter(
            "didi_http_responses", "Answers by status.", ["status"], registry=registry
        )

    def watch_queue(self, waiting: Callable[[], int]) -> None:
        """Ask for the length of the queue whenever numbers are read."""
        self.waiting.set_function(waiting)

    def passed(self, name: str, requests: int, texts: int, tokens: int, seconds: float) -> None:
        """Count a pass."""
        self.passes.labels(name).inc()
        self.pass_requests.labels(name).observe(requests)
        self.pass_texts.labels(name).observe(texts)
        self.pass_tokens.labels(name).observe(tokens)
        self.pass_seconds.labels(name).observe(seconds)

    def began(self, name: str, seconds: float) -> None:
        """Note when a request has taken its first step."""
        self.first.labels(name).observe(seconds)

    def ended(self, name: str, outcome: str, seconds: float, done: Done | None) -> None:
        """Count a request that is over."""
        self.requests.labels(name, outcome).inc()
        if done is None:
            return
        written = sum(map(sum, done.written))
        self.nfe.labels(name).observe(done.nfe)
        self.last.labels(name).observe(seconds)
        self.written.labels(name).inc(written)
        self.prompt_tokens.labels(name).inc(sum(map(done.given, range(len(done.tokens)))))

    def text(self) -> bytes:
        """All numbers, as Prometheus reads them."""
        return generate_latest(self.registry)

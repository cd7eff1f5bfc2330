"""Servers of tiny models, in the process and behind a socket."""

import threading
import time
from contextlib import contextmanager

import uvicorn

from didi_instruct.serving.app import create_app
from didi_instruct.serving.engine import BatchEngine, Limits
from didi_instruct.serving.metrics import Metrics
from didi_instruct.serving.served import Catalogue, Served


class Parts:
    """An application, and what it is made of."""

    def __init__(self, models, *, limits=None, chat=None, most_texts=8, **settings):
        self.metrics = Metrics()
        served = [
            Served(name, model, "student" if not k else "teacher", (chat or {}).get(name))
            for k, (name, model) in enumerate(models.items())
        ]
        self.catalogue = Catalogue(served, most_texts=most_texts, most_positions=4096)
        self.engine = BatchEngine(self.catalogue.models, limits or Limits(), self.metrics)
        self.app = create_app(self.catalogue, self.engine, self.metrics, **settings)

    def close(self):
        """Stop the engine at once."""
        self.engine.close(0)


@contextmanager
def listening(app, **settings):
    """Serve an application on a free port; yield its address and uvicorn's server."""
    config = uvicorn.Config(app, port=0, log_level="error", access_log=False, **settings)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.should_exit = True
        thread.join(30)

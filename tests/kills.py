"""Processes killed in the middle of a save."""

import os
from itertools import count

from didi_instruct.data.files import AtomicFile

CHANGES = ("mkdir", "replace", "rename", "link", "unlink", "rmdir", "fsync")
"""Functions of `os` by which a folder changes, or its changes last."""


def kills(monkeypatch, prepare, save, links=True):
    """Kill `save` before its first change of a folder, then before its second, and so on.

    Yields after each kill, and ends when `save` does; `links=False` is a file system without them.
    """
    for survived in count():
        prepare()
        calls = count()

        def mortal(name, calls=calls, survived=survived):
            act = getattr(os, name)

            def acting(*arguments, **options):
                if next(calls) >= survived:
                    raise KeyboardInterrupt
                if name == "link" and not links:
                    raise OSError
                return act(*arguments, **options)

            return acting

        with monkeypatch.context() as patch:
            patch.setattr(AtomicFile, "discard", lambda _: None)  # the dead do not tidy up
            for name in CHANGES:
                patch.setattr(os, name, mortal(name))
            try:
                save()
                return
            except KeyboardInterrupt:
                pass
        yield survived

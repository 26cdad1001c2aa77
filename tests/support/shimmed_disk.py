"""Stands between a program and the disk: told of each call that changes a folder, before it, amid it and after it."""

import builtins
import contextlib
import functools
import os
from unittest import mock

from tfopt import files

CALLS = ("open", "write", "fsync", "replace", "unlink", "mkdir", "ftruncate")
BEFORE, AMID, AFTER = 0, 0.5, 1


@contextlib.contextmanager
def shimmed(folder, on):
    """Calls `on(call, moment, path, arguments)` around each call inside the folder; amid a write, half is written.

    What `on` raises takes the place of what the call would do from there on.
    """
    real = {name: getattr(os, name) for name in CALLS}

    def shim(name):
        def called(*arguments, **options):
            path = _path(name, arguments)
            # Opening for reading changes nothing.
            if not _inside(folder, path) or (name == "open" and not arguments[1] & os.O_CREAT):
                return real[name](*arguments, **options)
            on(name, BEFORE, path, arguments)
            if name == "write":
                result = _in_halves(real["write"], *arguments, lambda: on(name, AMID, path, arguments))
            else:
                result = real[name](*arguments, **options)
            on(name, AFTER, path, arguments)
            return result

        return called

    with contextlib.ExitStack() as patches:
        for name in CALLS:
            patches.enter_context(mock.patch.object(os, name, shim(name)))
        patches.enter_context(mock.patch.object(files, "open", functools.partial(TextFile, folder, on), create=True))
        yield


class TextFile:
    """The one in which `write_atomic` writes."""

    def __init__(self, folder, on, handle, mode, **options):
        self._folder, self._on = folder, on
        self._file = builtins.open(handle, mode, **options)  # noqa: SIM115 - closed below
        self._path = _path("write", (handle,))
        self.flush, self.fileno = self._file.flush, self._file.fileno

    def write(self, text):
        half = len(text) // 2
        for moment, part in ((BEFORE, ""), (AMID, text[:half]), (AFTER, text[half:])):
            self._file.write(part)
            self._file.flush()
            if _inside(self._folder, self._path):
                self._on("write", moment, self._path, (self._file.fileno(),))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()


def _in_halves(write, handle, data, amid):
    half = len(data) // 2
    if half:
        write(handle, data[:half])
        amid()
    return half + write(handle, data[half:])


def _inside(folder, path):
    return path.startswith(str(folder))


def _path(name, arguments):
    if name == "replace":
        return os.path.abspath(arguments[1])
    where = arguments[0]
    return os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else os.path.abspath(where)

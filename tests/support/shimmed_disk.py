"""Stands between a program and the disk: told of each call that changes a folder, before it, amid it and after it."""

import builtins
import contextlib
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

    def inside(path):
        return path.startswith(str(folder))

    def shim(name):
        def called(*arguments, **options):
            path = _path(name, arguments)
            # Opening for reading changes nothing.
            if not inside(path) or (name == "open" and not arguments[1] & os.O_CREAT):
                return real[name](*arguments, **options)
            on(name, BEFORE, path, arguments)
            if name == "write":
                result = _in_halves(*arguments, lambda: on(name, AMID, path, arguments))
            else:
                result = real[name](*arguments, **options)
            on(name, AFTER, path, arguments)
            return result

        return called

    def _in_halves(handle, data, amid):
        half = len(data) // 2
        if half:
            real["write"](handle, data[:half])
            amid()
        return half + real["write"](handle, data[half:])

    class TextFile:
        """The one in which `write_atomic` writes."""

        def __init__(self, handle, mode, **options):
            self._file = builtins.open(handle, mode, **options)  # noqa: SIM115 - closed below
            self._path = _path("write", (handle,))
            self.flush, self.fileno = self._file.flush, self._file.fileno

        def write(self, text):
            half = len(text) // 2
            for moment, part in ((BEFORE, ""), (AMID, text[:half]), (AFTER, text[half:])):
                self._file.write(part)
                self._file.flush()
                if inside(self._path):
                    on("write", moment, self._path, (self._file.fileno(),))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self._file.close()

    with contextlib.ExitStack() as patches:
        for name in CALLS:
            patches.enter_context(mock.patch.object(os, name, shim(name)))
        patches.enter_context(mock.patch.object(files, "open", TextFile, create=True))
        yield


def _path(name, arguments):
    if name == "replace":
        return os.path.abspath(arguments[1])
    where = arguments[0]
    return os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else os.path.abspath(where)

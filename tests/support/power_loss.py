"""What a power loss may leave of a folder, by what was synced until then: the worst that POSIX allows.

A file has what it had when it was last synced, or anything. A folder has the entries it had when it was last synced,
and any of the changes after that.
"""

import os
import random

from shimmed_disk import AFTER, BEFORE


class Node:
    """A file or folder."""

    def __init__(self, path, is_folder):
        self.path, self.is_folder = path, is_folder
        self.synced = None  # what the file held; None if it never was


class Recorder:
    """Follows the calls that `shimmed` reports, from an empty folder on, and makes what a power loss may leave."""

    def __init__(self, root, on_moment):
        self.root, self._on_moment = str(root), on_moment
        self._live = {self.root: {}}
        self._durable = {self.root: {}}
        self._pending = {self.root: []}

    def __call__(self, call, moment, path, arguments):
        if moment == BEFORE:
            return
        if moment == AFTER:
            getattr(self, f"_{call}", self._other)(path, arguments)
        self._on_moment()

    def _other(self, path, arguments):
        pass

    def _open(self, path, arguments):
        folder, name = os.path.split(path)
        if name not in self._live[folder]:
            self._change(folder, {name: Node(path, False)})

    def _mkdir(self, path, arguments):
        self._live[path], self._durable[path], self._pending[path] = {}, {}, []
        folder, name = os.path.split(path)
        self._change(folder, {name: Node(path, True)})

    def _replace(self, path, arguments):
        folder, name = os.path.split(path)
        source = os.path.basename(arguments[0])
        node = self._live[folder][source]
        node.path = path
        self._change(folder, {source: None, name: node})

    def _unlink(self, path, arguments):
        folder, name = os.path.split(path)
        self._change(folder, {name: None})

    def _fsync(self, path, arguments):
        if path in self._live:
            self._durable[path], self._pending[path] = dict(self._live[path]), []
        elif path.startswith(self.root):
            folder, name = os.path.split(path)
            with open(path, "rb") as file:
                self._live[folder][name].synced = file.read()

    def _change(self, folder, entries):
        self._pending[folder].append(entries)
        _apply(self._live[folder], entries)

    def leave(self, target, how, seed=0):
        """Makes what is left, in an empty folder: "least", "names" without what they name, "most", or "any"."""
        self._leave(self.root, target, how, random.Random(seed))

    def _leave(self, folder, target, how, draw):
        entries = dict(self._durable[folder])
        for change in self._pending[folder]:
            if how in ("names", "most") or (how == "any" and draw.random() < 0.5):
                _apply(entries, change)
        target.mkdir(exist_ok=True)
        for name, node in entries.items():
            if node.is_folder:
                self._leave(node.path, target / name, how, draw)
            else:
                (target / name).write_bytes(self._content(node, how, draw))

    def _content(self, node, how, draw):
        if node.synced is not None:
            return node.synced
        now = b""
        if os.path.exists(node.path):
            with open(node.path, "rb") as file:
                now = file.read()
        choices = {"most": [now], "any": [b"", now, now[: len(now) // 2], bytes(len(now))]}
        return draw.choice(choices.get(how, [b""]))


def _apply(entries, change):
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node

"""A file of JSON lines that keeps what was measured, whenever the process is killed."""

import datetime
import json
import os


class Lines:
    """Appends records to a file, each on the disk before `append` returns."""

    def __init__(self, path):
        self.path = path

    def append(self, **values):
        """Writes one record, with the time as `at`. One write, so that a killed process leaves at most a torn line."""
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        text = json.dumps({**values, "at": now}, ensure_ascii=False)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as file:
            file.seek(max(0, file.tell() - 1))
            end_of_torn_line = b"" if file.read(1) in (b"\n", b"") else b"\n"
            file.write(end_of_torn_line + text.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self):
        """The records, oldest first, without torn ones."""
        if not self.path.exists():
            return []
        return [record for line in self.path.read_text("utf-8", "replace").splitlines() if (record := parsed(line))]


def parsed(line):
    """The JSON object on a line; None for anything else."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None

"""A machine's /proc and /sys under a folder, with the control groups that a test writes there."""

import os

import pytest

GIB = 2**30


class Machine:
    """A /proc and a /sys under a folder."""

    def __init__(self, folder):
        self.proc = folder / "proc"
        self.sys = folder / "sys"
        self.put("proc/cpuinfo", "processor\t: 0\nmodel name\t: A CPU @ 2 GHz\n\nprocessor\t: 1\nmodel name\t: other\n")
        self.put(
            "proc/meminfo", "MemTotal:       67108864 kB\nMemFree: 1 kB\nMemAvailable:   50331648 kB\nHugePages: 0\n"
        )
        self.put("proc/self/cgroup", "0::/\n")

    def put(self, path, text):
        file = self.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def group(self, path, **files):
        """Writes a cgroup's files; a "__" in a name stands for a dot."""
        for name, text in files.items():
            self.put(f"sys/fs/cgroup/{path}/{name.replace('__', '.')}", text)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """64 GiB, 48 of them available, eight CPUs, no limits."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, *range(7)}, raising=False)
    return Machine(tmp_path)

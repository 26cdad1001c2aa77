"""look_up(): all names at once, retried until the deadline and never beyond it."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tfopt.distribute import preflight
from tfopt.distribute.preflight import look_up


class Dns:
    """Stands in for `socket.getaddrinfo`: names that answer, appear late, fail or hang."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.released = threading.Event()
        self.together = threading.Barrier(20)

    def getaddrinfo(self, host: str, port: None, *, type: int) -> list[Any]:
        self.asked[host] += 1
        if host.startswith("hangs"):
            self.released.wait(30)
        if host.startswith("together"):
            self.together.wait(30)
        if host == "unknown" or (host == "late" and self.asked[host] < 3):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, type, 6, "", ("192.0.2.1", 0))]


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dns]:
    fake = Dns()
    monkeypatch.setattr(preflight.socket, "getaddrinfo", fake.getaddrinfo)
    monkeypatch.setattr(preflight, "_RETRY_SECONDS", 0.01)
    yield fake
    fake.released.set()


def test_addresses_are_in_the_form_that_bind_takes(dns: Dns) -> None:
    answers = look_up(["a", "b", "a"], deadline_seconds=30)
    known = [(socket.AF_INET, ("192.0.2.1", 0))]
    assert answers.found == {"a": known, "b": known}
    assert dns.asked == {"a": 1, "b": 1}


def test_all_are_asked_at_once(dns: Dns) -> None:
    hosts = [f"together{number}" for number in range(20)]  # none answers before all have been asked
    assert len(look_up(hosts, deadline_seconds=30).found) == 20


def test_a_name_that_appears_late_is_found(dns: Dns) -> None:
    answers = look_up(["late"], deadline_seconds=30)
    assert list(answers.found) == ["late"]


def test_an_unknown_name_has_its_reason(dns: Dns) -> None:
    answers = look_up(["a", "unknown"], deadline_seconds=0.1)
    assert list(answers.found) == ["a"]
    assert answers.failed == {"unknown": "Name or service not known"}
    assert dns.asked["unknown"] > 1


def test_a_hanging_lookup_does_not_delay_the_others(dns: Dns) -> None:
    began = time.monotonic()
    answers = look_up(["hangs1", "a", "hangs2"], deadline_seconds=0.5)
    assert time.monotonic() - began < 20  # far below the 30 s of the hang
    assert list(answers.found) == ["a"]
    assert answers.failed == {}
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "tfopt-names")


def test_a_name_that_python_cannot_encode_is_unknown_too() -> None:
    assert list(look_up(["a..b"], deadline_seconds=0.1).failed) == ["a..b"]


def test_more_names_than_threads(dns: Dns) -> None:
    assert len(look_up([f"host{number}" for number in range(1000)], deadline_seconds=30).found) == 1000

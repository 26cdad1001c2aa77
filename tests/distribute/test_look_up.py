"""look_up(): names at once, retried ever less often until the deadline, never beyond it, and no more than needed."""

import random
import socket
import threading
import time
from collections import Counter
from itertools import islice

import pytest

from tfopt.distribute import preflight
from tfopt.distribute.cluster.membership import Cluster
from tfopt.distribute.preflight import check_host, look_up
from tfopt.distribute.watchdog.barrier import pauses


class Dns:
    """Stands in for `socket.getaddrinfo`: names that answer, appear late, fail or hang."""

    def __init__(self):
        self.asked = Counter()
        self.released = threading.Event()
        self.together = threading.Barrier(20)

    def getaddrinfo(self, host, port, *, type):
        self.asked[host] += 1
        if host.startswith("hangs"):
            self.released.wait(30)
        if host.startswith("together"):
            self.together.wait(30)
        if host == "unknown" or (host == "late" and self.asked[host] < 3):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, type, 6, "", ("192.0.2.1", 0))]


@pytest.fixture
def dns(monkeypatch):
    fake = Dns()
    monkeypatch.setattr(preflight.socket, "getaddrinfo", fake.getaddrinfo)
    monkeypatch.setattr(preflight, "_LONGEST_PAUSE_SECONDS", 0.01)
    yield fake
    fake.released.set()


def test_addresses_are_in_the_form_that_bind_takes(dns):
    answers = look_up(["a", "b", "a"], deadline_seconds=30)
    known = [(socket.AF_INET, ("192.0.2.1", 0))]
    assert answers.found == {"a": known, "b": known}
    assert dns.asked == {"a": 1, "b": 1}


def test_all_are_asked_at_once(dns):
    hosts = [f"together{number}" for number in range(20)]  # none answers before all have been asked
    assert len(look_up(hosts, deadline_seconds=30).found) == 20


def test_a_name_that_appears_late_is_found(dns):
    answers = look_up(["late"], deadline_seconds=30)
    assert list(answers.found) == ["late"]


def test_an_unknown_name_has_its_reason(dns):
    answers = look_up(["a", "unknown"], deadline_seconds=0.1)
    assert list(answers.found) == ["a"]
    assert answers.failed == {"unknown": "Name or service not known"}
    assert dns.asked["unknown"] > 1


def test_a_hanging_lookup_does_not_delay_the_others(dns):
    began = time.monotonic()
    answers = look_up(["hangs1", "a", "hangs2"], deadline_seconds=0.5)
    assert time.monotonic() - began < 20  # far below the 30 s of the hang
    assert list(answers.found) == ["a"]
    assert answers.failed == {}
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "tfopt-names")


def test_a_name_that_python_cannot_encode_is_unknown_too():
    assert list(look_up(["a..b"], deadline_seconds=0.1).failed) == ["a..b"]


class Late:
    """A name server in virtual time, one clock a thread: the upper half of the hosts have a name after 20 s."""

    def __init__(self):
        self.asked_at = []
        self.clock = threading.local()

    def monotonic(self):
        return float(getattr(self.clock, "now", 0.0))

    def sleep(self, seconds):
        self.clock.now = self.monotonic() + seconds

    def getaddrinfo(self, host, port, *, type):
        self.asked_at.append((host, self.monotonic()))
        if int(host.removeprefix("host")) >= 256 and self.monotonic() < 20:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, type, 6, "", ("192.0.2.1", 0))]


@pytest.mark.slow
@pytest.mark.parametrize("chief", [0, 511])
def test_512_workers_of_which_half_the_names_come_20_s_late(monkeypatch, chief):
    late = Late()
    monkeypatch.setattr(preflight, "time", late)
    monkeypatch.setattr(preflight.socket, "getaddrinfo", late.getaddrinfo)
    monkeypatch.setattr(preflight, "_check_own", lambda *_: None)
    monkeypatch.setattr(preflight, "_check_port", lambda *_: None)
    hosts = [chief, *(host for host in range(512) if host != chief)]
    workers = tuple(f"host{host}:2222" for host in hosts)
    for rank in range(512):
        began = len(late.asked_at)
        check_host(Cluster("arguments", workers, rank), deadline_seconds=60)
        assert {host for host, _ in late.asked_at[began:]} == {f"host{chief}", f"host{hosts[rank]}"}
    a_second = Counter(int(at) for _, at in late.asked_at)
    # When each asked for all 512 names in 64 threads every 0.2 s, it was 163,840 look-ups a second.
    assert max(a_second.values()) < 3_000
    assert max(count for second, count in a_second.items() if second >= 5) <= 2 * 512 / 2
    assert max(a_second) < 25  # the last names are found within a pause


def test_pauses_grow_to_the_longest_and_differ_between_workers():
    waits = [list(islice(pauses(4.0), 40)) for _ in range(50)]
    for number, longest in enumerate((0.25, 0.5, 1.0, 2.0, 4.0, 4.0)):
        drawn = {each[number] for each in waits}
        assert longest / 2 <= min(drawn) <= max(drawn) <= longest
        assert len(drawn) == 50
    assert sum(waits[0]) > 40  # they do not shrink again


def test_pauses_do_not_touch_the_users_random_numbers():
    random.seed(0)
    state = random.getstate()
    assert list(islice(pauses(1.0), 3)) != list(islice(pauses(1.0), 3))
    assert random.getstate() == state

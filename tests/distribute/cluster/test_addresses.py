"""Addresses: valid and malformed ones, and which belong to the same machine."""

import pytest

from tfopt.distribute.cluster.membership import Address, brief, parse_address
from tfopt.errors import ClusterError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("gpu-1.cluster.local:2222", "gpu-1.cluster.local", 2222),
        ("tf_worker_1:1", "tf_worker_1", 1),
        ("192.0.2.1:65535", "192.0.2.1", 65535),
        ("[2001:db8::1]:2222", "2001:db8::1", 2222),
        ("[fe80::1%eth0]:2222", "fe80::1%eth0", 2222),
    ],
)
def test_addresses(text, host, port):
    assert parse_address(text, whose="worker 0") == Address(host, port)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a:0", "the port is '0'"),
        ("a:99999999999999999999", "the port is '99999999999999999999'"),
        ("a:٣", "the port is '٣'"),
        ("a:", "the port is ''"),
        ("a\x00:1", r"'a\\x00' is not a host name"),
        ("grpc//a:1", "'grpc//a' is not a host name"),
        ("a" * 254 + ":1", "is not a host name"),
        ("[::g]:1", "'::g' is not an IPv6 address"),
        ("[1.2.3.4]:1", "'1.2.3.4' is not an IPv6 address"),
        ("[::1%\x07]:1", r"'::1%\\x07' is not an IPv6 address"),
        ("::1:2222", "it does not have this form"),
        ("grpc://a:1", "it does not have this form"),
        (None, "None; it is not a string"),
        (b"a:1", "it is not a string"),
    ],
)
def test_a_malformed_address_is_refused_with_the_fault(text, fault):
    with pytest.raises(ClusterError, match=rf"^Expected the address of worker 7 as .* Found: .*{fault}. What to do: "):
        parse_address(text, whose="worker 7")


@pytest.mark.parametrize(
    ("one", "other"),
    [("Host", "host."), ("localhost", "127.0.0.1"), ("127.0.1.1", "::1"), ("2001:db8:0::1", "2001:DB8::1")],
)
def test_one_machine_in_two_spellings(one, other):
    assert Address(one, 1).machine == Address(other, 1).machine


def test_two_machines():
    assert len({Address(host, 1).machine for host in ("a", "b", "a.b", "192.0.2.1", "192.0.2.2", "::1")}) == 6


def test_a_long_value_is_shown_short_and_on_one_line():
    assert brief("x\n" * 10_000).startswith("'x\\nx")
    assert len(brief("x\n" * 10_000)) < 100
    assert brief(10**5000) == "an integer of 16610 bits"
    assert brief(-3) == "-3"

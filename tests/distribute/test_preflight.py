"""check_host(): names, this worker's address and its port. With real sockets."""

import socket

import pytest

from tfopt.distribute import preflight
from tfopt.distribute.cluster.membership import ONE_PROCESS, Cluster
from tfopt.distribute.preflight import check_host
from tfopt.errors import ClusterError


@pytest.fixture
def port():
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def listener():
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield held


def only(address):
    return Cluster("arguments", (address,), 0)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.9"])
def test_a_sound_host(host, port):
    check_host(only(f"{host}:{port}"))
    check_host(only(f"{host}:{port}"))  # the check itself holds nothing


def test_a_sound_host_with_ipv6(port):
    if not preflight._is_local(socket.AF_INET6, ("::1", 0, 0, 0)):
        pytest.skip("no IPv6 here")
    check_host(only(f"[::1]:{port}"))


def test_a_machine_without_ipv6(monkeypatch, listener, port):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    check_host(only(f"127.0.0.1:{port}"))
    with pytest.raises(ClusterError, match="to be free"):
        check_host(only(f"127.0.0.1:{listener.getsockname()[1]}"))


def test_one_process_has_nothing_to_check(monkeypatch):
    monkeypatch.setattr(preflight, "look_up", None)
    check_host(Cluster(ONE_PROCESS))


def test_names_that_do_not_resolve():
    cluster = Cluster("arguments", ("a..b:1", "127.0.0.2:1", "c..d:1", "e..f:1"), 2)
    with pytest.raises(ClusterError) as caught:
        check_host(cluster, deadline_seconds=0.3)
    text = str(caught.value)
    assert text.startswith(
        "Expected the host names of this worker and of the chief, worker 0, to resolve within 0.3 s. "
        "Found unresolved: a..b of worker 0 ("
    )
    assert "c..d of worker 2 (" in text
    assert "worker 1" not in text
    assert "What to do: " in text


def test_the_names_of_other_workers_are_theirs_to_check(port):
    check_host(Cluster("arguments", (f"127.0.0.1:{port}", "a..b:1"), 0), deadline_seconds=0.3)


def test_a_name_without_an_answer(monkeypatch, port):
    monkeypatch.setattr(preflight, "look_up", lambda hosts, deadline_seconds: preflight.Answers())
    with pytest.raises(ClusterError, match=r"localhost of worker 0 \(no answer\)"):
        check_host(only(f"localhost:{port}"))


def test_another_machines_address(port):
    cluster = Cluster("arguments", (f"127.0.0.1:{port}", f"192.0.2.1:{port}"), 1)
    with pytest.raises(
        ClusterError,
        match=rf"Expected 192\.0\.2\.1:{port}, the address of worker 1 \(this process\), to be this machine's"
        r".*this machine \(.*index",
    ):
        check_host(cluster)
    check_host(Cluster("arguments", cluster.workers, 0))


def test_the_machines_own_name_is_accepted_whatever_its_address(monkeypatch, port):
    monkeypatch.setattr(socket, "gethostname", lambda: "Here")
    elsewhere = [(socket.AF_INET, ("192.0.2.1", 0))]
    monkeypatch.setattr(preflight, "look_up", lambda hosts, deadline_seconds: preflight.Answers({"here": elsewhere}))
    check_host(only(f"here:{port}"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_a_port_that_is_taken_on_any_interface(host, listener):
    taken = listener.getsockname()[1]
    with pytest.raises(
        ClusterError, match=f"Expected port {taken} of {host}:{taken}, .* to be free. Found: Address"
    ) as e:
        check_host(only(f"{host}:{taken}"))
    assert isinstance(e.value.__cause__, OSError)
    listener.close()
    check_host(only(f"{host}:{taken}"))


def test_the_holder_of_the_port_is_named(listener, monkeypatch):
    monkeypatch.setattr(preflight, "port_holder", lambda port: f"python (process {port})")
    taken = listener.getsockname()[1]
    with pytest.raises(ClusterError, match=rf"; python \(process {taken}\) listens there\. What to do"):
        check_host(only(f"127.0.0.1:{taken}"))
    monkeypatch.setattr(preflight, "port_holder", lambda port: None)
    with pytest.raises(ClusterError, match=r"Address already in use\. What to do"):
        check_host(only(f"127.0.0.1:{taken}"))


def test_connections_of_a_server_that_has_ended_do_not_hold_the_port(listener):
    """A port with old connections in TIME_WAIT is free for TensorFlow too."""
    port = listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as client:
        served, _ = listener.accept()
        served.close()  # the side that closes first enters TIME_WAIT
        assert client.recv(1) == b""
    listener.close()
    check_host(only(f"127.0.0.1:{port}"))


def test_a_port_that_the_user_may_not_bind(monkeypatch):
    def refuse(port):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(preflight, "listen_everywhere", refuse)
    with pytest.raises(ClusterError, match=r"Found: Permission denied\. What to do: .*above 1023"):
        check_host(only("127.0.0.1:80"))

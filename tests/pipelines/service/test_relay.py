import socket

from tfopt.pipelines.service import relay


def test_connections_to_the_address_end_and_others_stay(monkeypatch):
    monkeypatch.setattr(relay, "_DROPS", 1)
    monkeypatch.setattr(relay, "_PAUSE_SECONDS", 0.0)
    here, there = socket.socketpair()  # of Unix, whose peers have no address and port
    with here, there, socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        with (
            socket.create_connection(server.getsockname(), timeout=10) as cut,
            socket.create_connection(other.getsockname(), timeout=10) as kept,
        ):
            relay.drop_connections("127.0.0.1:{1}".format(*server.getsockname())).join()
            assert cut.recv(1) == b""
            accepted, _ = other.accept()
            with accepted:
                accepted.sendall(b"x")
                assert kept.recv(1) == b"x"
        here.sendall(b"y")
        assert there.recv(1) == b"y"

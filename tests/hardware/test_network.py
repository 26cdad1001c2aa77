import socket

from tfopt.hardware.network import sent_bytes


def test_what_goes_over_the_loopback_is_counted():
    before = sent_bytes()
    server = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(server.getsockname())
    receiver, _ = server.accept()
    with server, sender, receiver:
        sender.sendall(b"x" * 100_000)
        received = 0
        while received < 100_000:
            received += len(receiver.recv(65536))
    assert sent_bytes() - before >= 100_000


def test_an_interface_that_is_not_there():
    assert sent_bytes("nonesuch0") is None

"""nccl_variables(): the record of what was set."""

from tfopt.distribute.nccl import nccl_variables


def test_only_those_of_nccl_in_order() -> None:
    environ = {"NCCL_SOCKET_IFNAME": "eth0", "PATH": "/bin", "NCCL_ALGO": "Ring", "MY_NCCL_X": "1"}
    assert list(nccl_variables(environ).items()) == [("NCCL_ALGO", "Ring"), ("NCCL_SOCKET_IFNAME", "eth0")]
    assert nccl_variables({}) == {}

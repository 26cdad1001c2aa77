from pathlib import Path

import pytest

from tfopt.distribute import Cluster, own_path

WORKERS = ("a:1", "b:1")


@pytest.mark.parametrize("path", ["model.keras", "logs/digits.weights.h5", "e{epoch:02d}-{val_loss:.2f}.keras", "logs"])
def test_the_chief_writes_to_the_path_and_the_others_beside_it(path):
    assert own_path(path, cluster=Cluster("arguments", WORKERS, 0)) == Path(path)
    other = own_path(path, cluster=Cluster("arguments", WORKERS, 1))
    assert other == Path(path).parent / f"worker1-{Path(path).name}"


def test_one_process_writes_to_the_path(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert own_path("model.keras") == Path("model.keras")

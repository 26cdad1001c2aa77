import pytest
import saved_trainings
from saving import disk_that_syncs_at_once, fresh_warnings

__all__ = ["disk_that_syncs_at_once", "fresh_warnings"]


@pytest.fixture(autouse=True)
def _quick_and_fresh(fresh_warnings, disk_that_syncs_at_once):
    """All tests here."""


@pytest.fixture
def trained(tmp_path):
    """The folder of a training that has ended: it holds its last checkpoints, and the best."""
    saved_trainings.train(tmp_path / "saved")
    return tmp_path / "saved"

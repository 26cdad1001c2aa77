import pytest
from taking import taking

from tfopt.compress import Footprint
from tfopt.compress.pruning import pruning, schedule

TIMES = taking(2.0, 2.0)


@pytest.fixture
def unmeasured(monkeypatch):
    """Measuring takes a second, and few tests are about it."""

    def footprints(models, data):
        return tuple(
            Footprint(parameters=model.count_params(), mib=1.0, gflops=None, step=TIMES, forward=TIMES, quality={})
            for model in models
        )

    for module in (pruning, schedule):
        monkeypatch.setattr(module, "footprints", footprints)

"""Each planted cause must come out first, in two trainings as users write them."""

import keras
import pytest
from planted_trainings import PLANTED

from tfopt.diagnosis import diagnose_fit

ROWS = [(cause, training) for cause, trainings in PLANTED.items() for training in trainings]


@pytest.mark.campaign  # which cause is the most expensive depends on how quiet the machine is
@pytest.mark.parametrize(("cause", "training"), ROWS, ids=[training.__name__ for _, training in ROWS])
def test_the_planted_cause_comes_first(cause, training):
    keras.utils.set_random_seed(0)
    model, arguments = training(mended=False)
    diagnosis = diagnose_fit(model, arguments)
    found = [one.name for one in diagnosis.worth_changing]
    assert cause in (found or ["nothing"])[0], str(diagnosis)

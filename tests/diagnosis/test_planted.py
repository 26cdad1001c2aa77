"""Each planted cause must come out first, in two trainings as users write them."""

import random

import keras
import pytest
from planted_trainings import PLANTED

from tfopt.diagnosis import diagnose_fit

ROWS = [(cause, training) for cause, trainings in PLANTED.items() for training in trainings]
TENTH = random.Random(20261125).sample(range(len(ROWS)), max(2, len(ROWS) // 10))
CASES = [
    pytest.param(
        cause, training, id=training.__name__, marks=pytest.mark.slow if number in TENTH else pytest.mark.campaign
    )
    for number, (cause, training) in enumerate(ROWS)
]


@pytest.mark.parametrize(("cause", "training"), CASES)
def test_the_planted_cause_comes_first(cause, training):
    keras.utils.set_random_seed(0)
    model, arguments = training(mended=False)
    diagnosis = diagnose_fit(model, arguments)
    assert diagnosis.worth_changing, str(diagnosis)
    assert cause in diagnosis.worth_changing[0].name, str(diagnosis)

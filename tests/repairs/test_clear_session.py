import sys
import types

import keras
import pytest
from keras.utils import clear_session
from quick import first_quick

from tfopt import repairs
from tfopt.internals.scopes import get_state, set_state

NAMES = ["keras.utils", "keras.backend", "keras.src.backend.common.global_state", __name__]


@pytest.mark.slow
@pytest.mark.parametrize("name", first_quick(NAMES))
def test_the_policy_survives_by_every_name(under, name):
    module = sys.modules[name]
    own = keras.DTypePolicy("mixed_float16")
    under(own)
    module.clear_session()
    assert keras.config.dtype_policy().name == "float32"  # stock
    repairs.install("clear_session")
    under(own)
    module.clear_session(free_memory=False)
    assert keras.config.dtype_policy() is own
    assert keras.layers.Dense(1).compute_dtype == "float16"


def test_the_rest_is_cleared(under):
    repairs.install("clear_session")
    under("mixed_bfloat16")
    keras.layers.Dense(1)
    clear_session()
    assert keras.layers.Dense(1).name == "dense"


def test_no_policy_stays_none():
    repairs.install("clear_session")
    set_state("dtype_policy", None)
    clear_session()
    assert get_state("dtype_policy") is None


def test_removed_without_a_trace():
    user = types.ModuleType("a_users_module")
    user.forget = clear_session
    sys.modules[user.__name__] = user
    try:
        original = clear_session
        repairs.install("clear_session")
        assert user.forget is keras.utils.clear_session is sys.modules[__name__].clear_session
        assert user.forget is not original
        assert user.forget.__name__ == "clear_session"
        repairs.remove("clear_session")
        assert user.forget is original
        assert all(sys.modules[name].clear_session is original for name in NAMES)
    finally:
        del sys.modules[user.__name__]

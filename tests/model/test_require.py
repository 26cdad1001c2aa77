import keras

from tfopt.model.require import is_keras_own


class Own(keras.layers.Dense):
    pass


def test_a_subclass_of_the_users_is_none_of_keras():
    assert is_keras_own(keras.layers.Dense(1))
    assert is_keras_own(keras.Sequential())
    assert not is_keras_own(Own(1))

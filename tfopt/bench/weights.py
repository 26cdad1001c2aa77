"""The weights of a net, for a comparison bit by bit."""

import keras
import numpy as np


def flat_weights(net: keras.Model) -> list[float]:
    """Every weight, one after the other."""
    return [float(value) for weights in net.get_weights() for value in np.ravel(weights)]

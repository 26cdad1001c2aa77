"""Times layers against the cheaper forms of them that `tfopt.compress.suggest` tries.

    python benchmarks/cost.py [FOLDER] [--case NAME]

Accuracy is not compared: only training shows what a form does to it.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import harness
import keras
import numpy as np

from tfopt import precision
from tfopt.bench.cases import Case, Scale, Timer, Variant
from tfopt.measure import StepTimer

_DEPTH = 3  # layers of a form, one after the other
_STEPS, _SAMPLES = 4, 2

_Build = Callable[[], keras.Layer]


@dataclass(frozen=True, slots=True)
class _Layers:
    """A layer's forms, the usual one first."""

    name: str
    shape: tuple[int, ...]
    """Of an example, which every form keeps."""
    forms: Mapping[str, _Build]


def cases(scale: Scale) -> list[Case]:
    """Lists the cases for this size."""
    channels, batch_size = (256, 64) if scale.resnet else (64, 16)
    return [
        _case(layers, batch_size) for layers in (_convolution(channels), _dense(8 * channels), _attention(8 * channels))
    ]


def _convolution(channels: int) -> _Layers:
    wide = partial(keras.layers.Conv2D, channels, padding="same")
    narrow = partial(keras.layers.Conv2D, channels // 4, padding="same", use_bias=False)
    rank = 9 * channels // 20  # with which both factors have half of the parameters of the 3×3 kernel
    low_rank = partial(keras.layers.Conv2D, rank, padding="same", use_bias=False)
    forms: dict[str, _Build] = {
        "3×3": partial(wide, 3),
        "separable convolution": partial(keras.layers.SeparableConv2D, channels, 3, padding="same"),
        "4 groups": partial(wide, 3, groups=4),
        "bottleneck": lambda: keras.Sequential([narrow(1), narrow(3), wide(1)]),
        "low-rank convolution": lambda: keras.Sequential([low_rank(3), wide(1)]),
    }
    return _Layers(f"convolution, {channels} channels", (16, 16, channels), forms)


def _dense(units: int) -> _Layers:
    whole = partial(keras.layers.Dense, units)
    forms: dict[str, _Build] = {
        "dense": whole,
        "low-rank dense": lambda: keras.Sequential([keras.layers.Dense(units // 4, use_bias=False), whole()]),
    }
    return _Layers(f"dense, {units} units", (units,), forms)


def _attention(width: int) -> _Layers:
    grouped = partial(keras.layers.GroupQueryAttention, width // 8, 8)
    forms: dict[str, _Build] = {"8 key heads": partial(grouped, 8), "2 key heads": partial(grouped, 2)}
    return _Layers(f"attention, 8 heads, width {width}", (64, width), forms)


def _case(layers: _Layers, batch_size: int) -> Case:
    usual, policy = next(iter(layers.forms)), precision.recommend().policy
    return Case(
        suite="cost",
        workload=layers.name,
        question=f"Which cheaper forms train faster here (batch of {batch_size}, {policy}, XLA)?",
        unit=f"training step of {_DEPTH} layers",
        variants=[
            Variant(
                name=name,
                note="the usual form" if name == usual else "fewer parameters; accuracy is not measured",
                timer=partial(_timer, layers.shape, build, batch_size, policy),
            )
            for name, build in layers.forms.items()
        ],
    )


def _timer(shape: tuple[int, ...], build: _Build, batch_size: int, policy: str, stack: ExitStack) -> Timer:
    random = np.random.default_rng(0)
    inputs, targets = (random.normal(size=(batch_size, *shape)).astype("float32") for _ in range(2))
    with precision.policy(policy):
        hidden = examples = keras.Input(shape)
        for _ in range(_DEPTH):
            layer = build()
            hidden = layer(hidden, hidden) if isinstance(layer, keras.layers.GroupQueryAttention) else layer(hidden)
        net = keras.Model(examples, hidden)
    net.compile("adam", "mse", jit_compile=True)
    return partial(StepTimer(net, (inputs, targets)), _STEPS, samples=_SAMPLES)


if __name__ == "__main__":
    harness.run_cases(__doc__, cases)

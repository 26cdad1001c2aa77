"""The perceptron 784-512-512-10 in PyTorch, as tfopt-bench's workload mlp trains it: Adam, batch 256, float32.

    pip install -r benchmarks/peers/requirements.txt
    python benchmarks/peers/mlp.py [--device cpu] [--tiny] [--variants NAME ...]

Eager and compiled, resident and fed from pinned memory; a line of JSON each. Exit code 3 where torch is not installed.
"""

from functools import partial

from training import Workload, arguments, run  # isort: skip

import torch
from torch import nn


class Perceptron(nn.Module):
    """The net and its loss."""

    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    def forward(self, images, labels):
        return nn.functional.cross_entropy(self.net(images), labels)


def batch(size, number):
    """Images from 0 to 1, (size, 784), and labels: what they show does not change the time."""
    generator = torch.Generator().manual_seed(number)
    return torch.rand(size, 784, generator=generator), torch.randint(10, (size,), generator=generator)


def workload(tiny):
    """The perceptron, or a narrow one."""
    size = 8 if tiny else 256
    return Workload(
        name="mlp",
        batch_size=size,
        model=partial(Perceptron, 16 if tiny else 512),
        batch=partial(batch, size),
        optimizer=partial(torch.optim.Adam, lr=1e-3, fused=True),
        autocast=False,
        steps=2 if tiny else 500,
        samples=2 if tiny else 10,
    )


if __name__ == "__main__":
    options = arguments(__doc__)
    run(workload(options.tiny), options)

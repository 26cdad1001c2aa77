"""ResNet-50 in PyTorch, as tfopt-bench's workload resnet50 trains it: SGD with momentum, batch 256, uint8 images.

    pip install -r benchmarks/peers/requirements.txt
    python benchmarks/peers/resnet50.py [--device cpu] [--tiny] [--variants NAME ...]

channels_last, bfloat16 autocast; eager and compiled, resident and fed from pinned memory; a line of JSON each. Exit
code 3 where torch is not installed.
"""

from functools import partial

from training import Workload, arguments, run  # isort: skip

import torch
from torch import nn


class Block(nn.Module):
    """Three convolutions and a way around them.

    The first one halves the image, as in the paper and in Keras. torchvision's net leaves that to the second, which is
    8 % more work: another net, and so not taken here.
    """

    def __init__(self, channels, width, stride):
        super().__init__()
        self.inner = nn.Sequential(
            *(nn.Conv2d(channels, width, 1, stride), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 4 * width, 1), nn.BatchNorm2d(4 * width)),
        )
        self.around = nn.Identity()
        if channels != 4 * width:
            self.around = nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride), nn.BatchNorm2d(4 * width))

    def forward(self, images):
        return nn.functional.relu(self.inner(images) + self.around(images))


class ResNet50(nn.Module):
    """From uint8 images to the loss."""

    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(3, 64, 7, 2, padding=3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
        channels = 64
        for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for number in range(count):
                layers.append(Block(channels, width, 2 if number == 0 and width > 64 else 1))
                channels = 4 * width
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
        self.to(memory_format=torch.channels_last)

    def forward(self, images, labels):
        return nn.functional.cross_entropy(self.net(images / 127.5 - 1), labels)


def batch(size, pixels, number):
    """uint8 images, (size, 3, pixels, pixels) in channels_last, and labels: what they show does not change the time."""
    generator = torch.Generator().manual_seed(number)
    images = torch.randint(256, (size, 3, pixels, pixels), dtype=torch.uint8, generator=generator)
    return images.contiguous(memory_format=torch.channels_last), torch.randint(1000, (size,), generator=generator)


def workload(tiny):
    """The net on images of a photograph's size, or on small ones."""
    size = 2 if tiny else 256
    return Workload(
        name="resnet50",
        batch_size=size,
        model=ResNet50,
        batch=partial(batch, size, 64 if tiny else 224),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
        steps=1 if tiny else 20,
        samples=2 if tiny else 10,
    )


if __name__ == "__main__":
    options = arguments(__doc__)
    run(workload(options.tiny), options)

"""tfopt's input pipeline beside a PyTorch DataLoader with PIL, on the same JPEG files, in one run.

    pip install '.[bench]' -r benchmarks/peers/requirements.txt
    python benchmarks/torch_pipeline.py [FOLDER]

Both decode, crop at random and resize to 224×224 with as many workers as there are CPUs, in batches of 32. Batches are
drawn in turns, the input alone. Exit code 3 where torch is not installed.
"""

import math
import sys
from functools import partial

import harness
import numpy as np
from PIL import Image

from tfopt.bench.cases import Case, DrawTimer, Variant
from tfopt.bench.workloads import photos
from tfopt.hardware import host
from tfopt.pipelines import RandomCrop, build_pipeline

try:
    import torch
    from torch.utils.data import DataLoader, Dataset, RandomSampler
except ImportError as error:
    print(f"Skipped: expected torch. Found: {error}. Run: pip install -r benchmarks/peers/requirements.txt")
    sys.exit(3)

BATCH, STEPS, WARMUP, SAMPLES = 32, 40, 8, 2
WORKERS = max(1, math.floor(host().cpus))


class Photos(Dataset):
    """Decodes with PIL, crops as torchvision's RandomResizedCrop does, and resizes bilinearly."""

    def __init__(self, folder):
        self.files = sorted(folder.glob("*/*.jpg"))
        classes = sorted({file.parent.name for file in self.files})
        self.labels = [classes.index(file.parent.name) for file in self.files]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        with Image.open(self.files[index]) as image:
            image = image.convert("RGB")
        left, top, width, height = self.window(*image.size)
        box = (left, top, left + width, top + height)
        # reducing_gap is PIL's own shortcut; without it resizing takes longer.
        small = image.resize((photos.SIZE, photos.SIZE), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
        return torch.from_numpy(np.asarray(small).copy()), self.labels[index]

    @staticmethod
    def window(width, height):
        for _ in range(10):
            area = width * height * float(torch.empty(1).uniform_(0.08, 1.0))
            ratio = math.exp(float(torch.empty(1).uniform_(math.log(3 / 4), math.log(4 / 3))))
            wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < wide <= width and 0 < high <= height:
                left = int(torch.randint(0, width - wide + 1, (1,)))
                return left, int(torch.randint(0, height - high + 1, (1,))), wide, high
        return 0, 0, width, height


def loader(folder):
    """Batches for a whole measurement: the workers are started once, outside of the samples."""
    data = Photos(folder)
    examples = (STEPS + WARMUP + 4) * BATCH
    return DataLoader(
        data,
        batch_size=BATCH,
        sampler=RandomSampler(data, replacement=True, num_samples=examples),
        num_workers=WORKERS,
        prefetch_factor=4,
        multiprocessing_context="forkserver",  # TensorFlow's threads do not survive a fork
    )


def built(folder):
    """The same through tfopt."""
    return build_pipeline(folder, batch_size=BATCH, crop=RandomCrop(photos.SIZE), cache=None).repeat()


def cases(scale):
    """The comparison."""
    makers = {f"PyTorch DataLoader, {WORKERS} workers": loader, "build_pipeline, crop": built}

    def timer(make, stack):
        folder = photos.folder(scale.photos)
        return partial(DrawTimer(partial(make, folder), BATCH), STEPS, warmup=WARMUP, samples=SAMPLES)

    notes = {loader: f"PIL, torch {torch.__version__}", built: "crop=RandomCrop(224)"}
    variants = [Variant(name=name, note=notes[make], timer=partial(timer, make)) for name, make in makers.items()]
    question = "How fast is the input alone, with a random crop of each JPEG?"
    unit = f"batch of {BATCH}, input alone"
    return [
        Case(suite="peers", workload="photos, random crop", question=question, unit=unit, variants=variants),
    ]


if __name__ == "__main__":
    harness.run_cases(__doc__, cases)

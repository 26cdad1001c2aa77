"""PyTorch's DataLoader: the same batches, by the samplers and data sets that it is quickest with.

They are handed over as tensors of TensorFlow, which `fit` would otherwise make of them.
"""

from importlib import metadata

import tensorflow as tf

from pipeline_cases import TORCH, Way, no_way

try:
    import torch
    from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
except ImportError:
    torch = None

_MISSING = "not installed: pip install -r benchmarks/peers/requirements.txt"


def by_torch(note, make):
    """The way of a DataLoader that `make` returns."""
    if torch is None:
        return no_way(TORCH, _MISSING)
    return Way(TORCH, f"torch {metadata.version('torch')}: {note}", make)


def gathered(columns, label, batch):
    """A DataLoader over columns in memory that indexes each with all numbers of a batch at once."""

    class Rows(torch.utils.data.Dataset):
        def __init__(self):
            self.columns = {name: torch.from_numpy(column) for name, column in columns.items()}

        def __len__(self):
            return len(self.columns[label])

        def __getitem__(self, numbers):
            at = torch.tensor(numbers)
            found = {name: column[at] for name, column in self.columns.items()}
            return found, found.pop(label)

    rows = Rows()
    sampler = BatchSampler(RandomSampler(rows), batch, drop_last=True)
    return _Converted(DataLoader(rows, batch_size=None, sampler=sampler))


def streamed(batches):
    """A DataLoader over a function that yields batches."""

    class Batches(IterableDataset):
        def __iter__(self):
            return batches()

    return _Converted(DataLoader(Batches(), batch_size=None))


class _Converted:
    """The batches of a DataLoader as tensors of TensorFlow."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        for batch in self.loader:
            yield tf.nest.map_structure(lambda tensor: tf.convert_to_tensor(tensor.numpy()), tuple(batch))

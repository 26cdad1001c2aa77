"""PyTorch's loaders, by doubles that behave as its own do: torch is too large to install for a few tests."""

import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines import build_pipeline, loader, plan_pipeline


class Tensor:
    """Memory on a device, which NumPy reads only on the host, without gradients, dense, and of its own types."""

    __module__ = "torch"

    def __init__(self, array, dtype="torch.float32", device="cpu", layout="torch.strided", requires_grad=False):
        self.array, self.dtype, self.device = array, dtype, device
        self.layout, self.requires_grad = layout, requires_grad

    def _with(self, **changes):
        return Tensor(**{**vars(self), **changes})

    def detach(self):
        return self._with(requires_grad=False)

    def cpu(self):
        return self._with(device="cpu")

    def contiguous(self):
        return self

    def view(self, dtype):
        return self._with(array=self.array.view(np.dtype(dtype)), dtype=f"torch.{dtype}")

    def numpy(self):
        if self.requires_grad or self.device != "cpu":
            raise RuntimeError("Can't call numpy() on Tensor that requires grad, or of a GPU")
        if self.layout != "torch.strided" or "float8" in self.dtype or self.dtype == "torch.bfloat16":
            raise TypeError("can't convert it to numpy")
        return self.array


class DataLoader:
    """Yields lists of tensors; with persistent workers, one iterator that begins anew."""

    __module__ = "torch.utils.data.dataloader"

    def __init__(self, batches, length=None, persistent=False):
        self.batches, self.length, self.persistent = batches, length, persistent
        self.iterator = None

    def __len__(self):
        if self.length is None:
            raise TypeError("object of type 'IterableDataset' has no len()")
        return self.length

    def __iter__(self):
        if self.iterator is None or not self.persistent:
            self.iterator = Iterator()
        self.iterator.left = list(self.batches)
        return self.iterator


class Iterator:
    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


def batch(start, size):
    x = np.arange(start, start + size, dtype="float32")
    return [Tensor(x[:, None], device="cuda", requires_grad=True), tuple(f"n{number:.0f}" for number in x)]


BATCHES = [batch(0, 3), batch(3, 3), batch(6, 1)]


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_those_of_the_loader(persistent):
    dataset = build_pipeline(DataLoader(BATCHES, length=3, persistent=persistent))
    assert len(dataset) == 3
    for _ in range(2):
        found = list(dataset.as_numpy_iterator())
        assert [x[:, 0].tolist() for x, _ in found] == [[0, 1, 2], [3, 4, 5], [6]]
        assert [names.tolist() for _, names in found] == [[b"n0", b"n1", b"n2"], [b"n3", b"n4", b"n5"], [b"n6"]]


def test_one_of_iterable_data_has_no_length():
    plan = plan_pipeline(DataLoader(BATCHES), seed=1)
    assert plan.source.name == "PyTorch DataLoader"
    assert plan.stage("read").count is None
    assert int(plan.build().cardinality()) == tf.data.UNKNOWN_CARDINALITY
    with pytest.raises(UnsupportedError, match="PyTorch DataLoader, which decides what it yields"):
        plan.at(1)


def test_bfloat16_keeps_its_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(int16="int16"))
    values = np.array([1, -2.5], tf.bfloat16.as_numpy_dtype)
    (found,) = build_pipeline(DataLoader([Tensor(values, "torch.bfloat16")], length=1))
    assert found.dtype == tf.bfloat16
    np.testing.assert_array_equal(found.numpy(), values)


@pytest.mark.parametrize("kind", [{"dtype": "torch.float8_e4m3fn"}, {"layout": "torch.sparse_coo"}])
def test_what_numpy_cannot_hold_is_refused_by_place(kind):
    bad = [Tensor(np.zeros((2, 1))), {"z": Tensor(np.zeros(2), **kind)}]
    with pytest.raises(PipelineError, match=rf"Found.*{next(iter(kind.values()))}.*at batch 0\[1\]\['z'\].*Convert it"):
        loader(DataLoader([bad]))

import pytest

from tfopt import errors


def test_the_nearest_name_is_offered():
    error = errors.unknown_name("suite", "precison", ["precision", "xla"])
    assert str(error) == "Expected a suite: 'precision' or 'xla'. Received: 'precison'. Did you mean 'precision'?"


@pytest.mark.parametrize("received", ["zzzz", "", 7, None])
def test_nothing_near_offers_nothing(received):
    assert "Did you mean" not in str(errors.unknown_name("image format", received, ["png"]))
    assert str(errors.unknown_name("image format", received, ["png"])).startswith("Expected an image format: 'png'.")


def test_one_family():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) >= 5
    assert all(issubclass(kind, errors.TfoptError) for kind in kinds)

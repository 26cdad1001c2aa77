import pytest
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.repairs.fit_data import explained_input_errors


@tf.function
def total(iterator):
    return sum(next(iterator) for _ in range(2))


def test_a_function_of_the_data_that_fails_in_a_graph():
    numbers = tf.data.Dataset.from_tensor_slices(["1", "two"]).map(tf.strings.to_number)
    expected = r"^Expected data that can be read to the end of the epoch\. Found: InvalidArgumentError: Error in "
    expected += r"user-defined .*StringToNumberOp could not correctly convert string: two\. What to do: "
    with pytest.raises(PipelineError, match=expected), explained_input_errors():
        total(iter(numbers))


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.UnavailableError(None, None, "Connection reset by peer [[{{node IteratorGetNext}}]]"),
        tf.errors.OutOfRangeError(None, None, "End of sequence [[{{node IteratorGetNext}}]]"),
        tf.errors.InvalidArgumentError(None, None, "indices[0] = 9 is not in [0, 4) [[{{node model/embedding}}]]"),
    ],
)
def test_other_errors_pass_unchanged(error):
    with pytest.raises(type(error)) as raised, explained_input_errors():
        raise error
    assert raised.value is error

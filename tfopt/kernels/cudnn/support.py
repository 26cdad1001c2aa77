"""What rules out cuDNN's attention."""

from collections.abc import Iterator

import tensorflow as tf

from tfopt.internals import graphs
from tfopt.internals.runtime import has_tangents, is_op_determinism_enabled

# cuDNN before 9.0 refused shorter sequences (cudnn-frontend, scaled_dot_product_flash_attention.h), which gain little.
SHORTEST = 64


def obstacles(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> Iterator[str]:
    """Yields what rules out cuDNN for an attention while it is traced; nothing if cuDNN can compute it."""
    yield from step_obstacles()
    if has_tangents([query, key, value]):
        yield "a ForwardAccumulator, for which cuDNN has no derivative"
    yield from _head_obstacles(query.dtype.name, query.shape[-1], value.shape[-1])
    if len({query.dtype, key.dtype, value.dtype}) > 1:
        yield f"different data types ({query.dtype.name}, {key.dtype.name}, {value.dtype.name})"
    yield from _of_shapes(query.shape, key.shape, value.shape)


def step_obstacles() -> Iterator[str]:
    """Yields what rules out cuDNN for any attention of the step that is being traced."""
    if not in_xla():
        yield "not compiled by XLA"
    elif compute_capabilities() and device_type() != "GPU":
        yield "not placed on a GPU"
    if tf.distribute.has_strategy():
        yield "a distribution strategy"
    if "loop_body" in tf.get_current_name_scope().split("/"):
        yield "a vectorized map, for which cuDNN has no form"
    yield from _machine_obstacles()


def standing_obstacles(dtype: str) -> Iterator[str]:
    """Yields what rules out cuDNN for any batch: the machine and the data type."""
    yield from _machine_obstacles()
    yield from _head_obstacles(dtype, None, None)


def _machine_obstacles() -> Iterator[str]:
    capabilities = compute_capabilities()
    if not capabilities:
        yield "no GPU"
    if any(capability < (8, 0) for capability in capabilities):
        yield "a GPU older than Ampere"
    if is_op_determinism_enabled():
        yield "op determinism, which cuDNN's backward pass does not give"


def _head_obstacles(dtype: str, key_size: int | None, value_size: int | None) -> Iterator[str]:
    if dtype not in ("bfloat16", "float16"):
        yield f"{dtype}, where cuDNN takes bfloat16 or float16"
    # What cuDNN supports on every GPU since Ampere, forward and backward. JAX checks the same:
    # check_is_flash_attention in jax/_src/cudnn/fused_attention_stablehlo.py.
    if key_size != value_size:
        yield f"keys of size {key_size} with values of size {value_size}"
    elif key_size is not None and (not 0 < key_size <= 128 or key_size % 8):
        yield f"heads of size {key_size}, where cuDNN takes multiples of 8 up to 128"


def in_xla() -> bool:
    """Whether the code being traced becomes part of a function with `jit_compile=True`."""
    return not tf.executing_eagerly() and graphs.in_xla(tf.compat.v1.get_default_graph())


def device_type() -> str:
    """Where the code being traced will run: "GPU", "CPU", or "" if unknown.

    A function runs where it is called, which its graph does not record; an operation outside all graphs runs there too.
    """
    with tf.init_scope():
        return tf.DeviceSpec.from_string(tf.zeros(()).device).device_type or ""


def compute_capabilities() -> list[tuple[int, int]]:
    """Returns the compute capability of each GPU that TensorFlow sees."""
    details = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    return [detail.get("compute_capability", (0, 0)) for detail in details]


def _of_shapes(query: tf.TensorShape, key: tf.TensorShape, value: tf.TensorShape) -> Iterator[str]:
    if query.rank != 4:
        yield f"{query.rank} axes, where cuDNN takes batch, sequence, heads and size"
        return
    if not all(shape.is_fully_defined() for shape in (query, key, value)):
        names = ("batch", "sequence", "heads", "size")
        unknown = [name for name, *sizes in zip(names, query, key, value, strict=True) if None in sizes]
        yield f"a {' and '.join(unknown)} of no fixed size"
        return
    if (query[0], query[3]) != (key[0], key[3]) or key[:3] != value[:3] or query[2] % max(1, key[2]):
        yield f"different shapes {query}, {key} and {value}"
    if not query[0] or not query[2]:
        yield f"an empty query {query}"
    if min(query[1], key[1]) < SHORTEST:
        yield f"a sequence of {min(query[1], key[1])}, below {SHORTEST}"

"""What a user reads when a step runs out of memory. The tests raise TensorFlow's errors; another file has true ones."""

import math
import re
from types import SimpleNamespace

import keras
import language_nets
import numpy as np
import pytest
import tensorflow as tf
from fake_nvml import FakeGpu
from models import assert_same_state, state
from versions import make_unknown, since_keras

from tfopt import batch, errors, memory, repairs
from tfopt.kernels import chunk_cross_entropy
from tfopt.memory import estimate, explained_errors, gpus, out_of_memory, remedies
from tfopt.model.state import STEP_FUNCTIONS

EXAMPLES, WIDTH = 512, 256
X, Y = np.ones((EXAMPLES, WIDTH), "float32"), np.ones((EXAMPLES, 1), "float32")
SPECS = tf.TensorSpec(X.shape), tf.TensorSpec(Y.shape)
OOM = "OOM when allocating tensor with shape[512,256] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by"


@pytest.fixture(autouse=True)
def without_xla(monkeypatch, request):
    """Does not try XLA, which takes seconds, but where a test's name says that it compiles."""
    if "compile" not in request.node.name:
        monkeypatch.setattr(remedies, "_under_xla", remedies._flash)


def dense_net(depth=4, activation="tanh", **options):
    layers = [keras.layers.Dense(WIDTH, activation=activation, name=f"dense_{number}") for number in range(depth)]
    net = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1, name="last")], name="net")
    net.compile(**{"optimizer": "adam", "loss": "mse", "jit_compile": False} | options)
    return net


def exhausted(text=f"{OOM} allocator GPU_0_bfc\n\t [[{{{{node net_1/dense_3_1/MatMul}}}}]] [Op:__inference_f_7]"):
    return tf.errors.ResourceExhaustedError(None, None, text)


def failing(error):
    """A step function that raises an error."""

    def function(iterator):
        raise error

    return function


def explanation(net, error=None, **arguments):
    """What `fit` raises."""
    net.train_function = failing(error or exhausted())
    with pytest.raises(errors.OutOfMemoryError) as raised, explained_errors(net):
        net.fit(**{"x": X, "y": Y, "batch_size": EXAMPLES, "verbose": 0} | arguments)
    return str(raised.value)


def named(text):
    """The remedies of an explanation: figure, or None, by the function that is named."""
    lines = text[text.index("What to do") :].splitlines()[1:]
    rows = [re.match(r"  \d\. +(?:([\d.,]+) MiB(?:, fits)?)? *tfopt\.([\w.]+)", line) for line in lines]
    return {row[2]: float(row[1].replace(",", "")) if row[1] else None for row in rows if row}


def with_a_gpu(fake_nvml, monkeypatch, limit_mib, capability=(9, 0)):
    """Pretends that the model trains on a GPU of which TensorFlow may take so much."""
    fake_nvml.gpus.append(FakeGpu(compute_capability=capability))
    monkeypatch.setattr(gpus.gpu_memory, "limit_bytes", lambda device: limit_mib * 2**20)


FORMS = {
    exhausted(): "operation net_1/dense_3_1/MatMul asked for 512.0 KiB (a float32 tensor of shape [512, 256]), and",
    exhausted(f"Graph execution error:\n\n{OOM.replace('[512,256]', '[]').replace('float', 'half')} allocator x"): (
        "the step asked for 2 B (a float16 tensor of shape []), and"
    ),
    exhausted(
        "\x1b[1m{{function_node __wrapped__BiasAdd_device_/job:localhost/replica:0/task:0/device:GPU:0}} "
        f"{OOM} allocator GPU_0_bfc [Op:BiasAdd]\x1b[0m"
    ): "operation BiasAdd asked for 512.0 KiB",
    exhausted(
        "Out of memory while trying to allocate 506.08MiB.\n\t [[{{node StatefulPartitionedCall}}]]\nHint: If you want "
        "[Op:__inference_multi_step_on_iterator_2457]"
    ): "the step's XLA program asked for 506.08 MiB, and",
    exhausted("Out of memory while trying to allocate 6291456 bytes.\nBufferAssignment OOM Debugging."): (
        "asked for 6.0 MiB, and"
    ),
    exhausted("Failed to allocate request for 1.50GiB (1610612736B) on device ordinal 0"): "asked for 1.5 GiB, and",
    exhausted("failed to allocate memory [Op:AddV2]"): "operation AddV2 asked for memory, and",
    exhausted("2 root error(s) found.\n  (0) SameWorkerRecvDone unable to allocate output tensor."): (
        "asked for memory (2 root error(s) found. (0) SameWorkerRecvDone unable to allocate output tensor), and"
    ),
    tf.errors.UnknownError(
        None,
        None,
        "CUDNN failed to allocate the scratch space for the runner or to find a working no-scratch runner.\n\t "
        "[[{{node gradient_tape/net_1/conv3d_20_1/Conv3D/Conv3DBackpropFilterV2}}]]",
    ): "operation gradient_tape/net_1/conv3d_20_1/Conv3D/Conv3DBackpropFilterV2 asked for memory for cuDNN's workspace",
    tf.errors.NotFoundError(
        None,
        None,
        "No algorithm worked!  Error messages:\n  Profiling failure on CUDNN engine eng11{}: UNKNOWN: "
        "CUDNN_STATUS_ALLOC_FAILED\nin tensorflow/compiler/xla/stream_executor/cuda/cuda_dnn.cc(5333): 'status'",
    ): "asked for memory for cuDNN's workspace",
    tf.errors.InternalError(None, None, "failed to create cublas handle: CUBLAS_STATUS_ALLOC_FAILED"): (
        "asked for memory for cuBLAS's workspace"
    ),
    tf.errors.InternalError(None, None, "Failed to load in-memory CUBIN: CUDA_ERROR_OUT_OF_MEMORY: out of memory"): (
        "asked for memory of CUDA itself, beside what TensorFlow holds, and"
    ),
    tf.errors.InternalError(
        None,
        None,
        "Failed copying input tensor from /job:localhost/replica:0/task:0/device:CPU:0 to /job:localhost/replica:0/"
        "task:0/device:GPU:0 in order to run _EagerConst: Dst tensor is not initialized.",
    ): "asked for memory for a copy to the GPU",
}


@pytest.fixture(scope="module")
def net():
    return dense_net()


@pytest.mark.parametrize(("error", "said"), FORMS.items(), ids=range(len(FORMS)))
def test_who_asked_for_how_much(net, error, said):
    net.predict_function = failing(error)
    with pytest.raises(errors.OutOfMemoryError, match="a step of the prediction") as raised, explained_errors(net):
        net.predict(X, verbose=0)
    assert said in str(raised.value).replace("\n", " ")
    assert isinstance(raised.value, errors.TfoptError)
    assert isinstance(raised.value, tf.errors.ResourceExhaustedError)
    assert raised.value.__cause__ is error


def test_other_errors_stay_as_they_are(net, monkeypatch):
    on_host = exhausted(f"{OOM} allocator cpu".replace("GPU:0", "CPU:0"))
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: ["a GPU"])
    for error in (tf.errors.InvalidArgumentError(None, None, "Incompatible shapes"), ValueError("no"), on_host):
        net.predict_function = failing(error)
        with pytest.raises(type(error)) as raised, explained_errors(net):
            net.predict(X, verbose=0)
        assert raised.value is error


LACKS = [
    tf.errors.InternalError(None, None, "RESOURCE_EXHAUSTED: no memory"),
    tf.errors.InternalError(None, None, "CUSOLVER_STATUS_ALLOC_FAILED"),
    MemoryError(),
]


@pytest.mark.parametrize("error", [*FORMS, *LACKS], ids=range(len(FORMS) + len(LACKS)))
def test_a_lack_of_memory_is_known_by_its_text(error):
    assert out_of_memory.is_out_of_memory(error)


@pytest.mark.parametrize("error", [tf.errors.InternalError(None, None, "a bug"), RuntimeError("out of memory")])
def test_another_error_is_no_lack_of_memory(error):
    assert not out_of_memory.is_out_of_memory(error)


def fails_elsewhere(net, error):
    net.train_function = failing(ValueError("caught"))
    with pytest.raises(ValueError, match="caught"):
        net.fit(X, Y, verbose=0)
    raise error


def test_an_error_outside_the_models_methods_stays_as_it_is(net):
    error = exhausted()
    with pytest.raises(tf.errors.ResourceExhaustedError) as raised, explained_errors(net):
        fails_elsewhere(net, error)
    assert raised.value is error


def test_the_model_comes_first():
    with pytest.raises(TypeError, match="Expected"), explained_errors(print):
        pass


@pytest.mark.slow
@pytest.mark.no_gpu
def test_the_whole_text():
    net = dense_net(6)
    found = explanation(net)
    takes = estimate(net, SPECS)
    parts = "\n\n".join(str(takes).split("\n\n")[:2])
    with remedies._recomputing(net):
        recomputed = estimate(net, SPECS).total_mib
    sums = 2 * sum(np.prod(weight.shape) for weight in net.trainable_weights) * 4 / 2**20
    half = takes.total_mib_at(EXAMPLES // 2) + sums
    assert (
        found.split()
        == (
            "Expected a training step that fits into the memory of the device. Found: layer 'dense_3' (operation "
            "net_1/dense_3_1/MatMul) asked for 512.0 KiB (a float32 tensor of shape [512, 256]), and not that "
            f"much was left. {parts} What to do, and what the step would then take: "
            f"1. {recomputed:.3g} MiB tfopt.memory.recompute(model): a step takes up to a third longer. "
            f"2. {half:.3g} MiB tfopt.batch.accumulate(model, 2), with batches of 256 examples. "
            "The failed step may have changed some weights already. Go on from a checkpoint."
        ).split()
    )


def everything(net):
    return {(layer.path, name): id(value) for layer in net._flatten_layers() for name, value in vars(layer).items()}


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_model_stays_as_it_was(fake_nvml, monkeypatch, jit_compile):
    with_a_gpu(fake_nvml, monkeypatch, 1)
    net = dense_net(jit_compile=jit_compile)
    net.fit(X, Y, verbose=0)
    net.evaluate(X, Y, verbose=0)
    net.reset_metrics()
    traced, before, attributes = [getattr(net, name) for name in STEP_FUNCTIONS], state(net), everything(net)
    step = net.train_function
    made = []
    monkeypatch.setattr(type(net), "make_train_function", lambda self, force=False: made.append(self))
    text = explanation(net)
    assert len(made) == 1  # by fit
    assert len(named(text)) >= 2
    net.train_function = step
    assert [getattr(net, name) for name in STEP_FUNCTIONS] == traced
    assert {key for key, value in everything(net).items() if attributes.get(key) != value} == {("net", "history")}
    assert len(everything(net)) == len(attributes)
    assert_same_state(state(net), before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "policy"), [((9, 0), "mixed_bfloat16"), ((7, 5), "mixed_float16"), ((6, 1), None)]
)
def test_mixed_precision_where_there_are_tensor_cores(fake_nvml, monkeypatch, capability, policy):
    with_a_gpu(fake_nvml, monkeypatch, 10, capability)
    net = dense_net()
    found = explanation(net)
    assert (policy is not None) == ("precision.apply" in named(found))
    if policy is not None:
        assert f'tfopt.precision.apply(model, "{policy}")' in found
        assert named(found)["precision.apply"] < estimate(net, SPECS).total_mib
    assert "of GPU:0. Found" in found
    assert "\n\nGPU:0: 900 MiB held, 100 MiB by others, 143,771 MiB total.\n\n" in found


@pytest.mark.slow
def test_the_figure_of_mixed_precision_is_that_of_a_mixed_model(fake_nvml, monkeypatch):
    from tfopt import precision

    with_a_gpu(fake_nvml, monkeypatch, 10)
    net = dense_net()
    found = named(explanation(net))["precision.apply"]
    precision.apply(net, "mixed_bfloat16")
    assert estimate(net, SPECS).total_mib == pytest.approx(found, rel=0.01)
    assert "precision.apply" not in named(explanation(net))  # it is on


@pytest.mark.slow
def test_batches_are_as_large_as_fit(fake_nvml, monkeypatch):
    net = dense_net(1)
    takes = estimate(net, SPECS)
    with_a_gpu(fake_nvml, monkeypatch, limit := 0.95 * takes.total_mib)
    found = explanation(net)
    steps = int(re.search(r"accumulate\(model, (\d+)\)", found)[1])
    sums = 2 * sum(np.prod(weight.shape) for weight in net.trainable_weights) * 4 / 2**20
    assert steps == math.ceil(EXAMPLES / takes.largest_batch(0.9 * limit - sums)) > 2
    assert named(found)["batch.accumulate"] <= 0.9 * limit + 0.005  # rounded
    assert f"(there is room for {0.9 * limit:.3g} MiB)" in found
    assert re.findall(r"MiB(, fits)? +tfopt\.([\w.]+)", found)[-1] == (", fits", "batch.accumulate")


@pytest.mark.parametrize(
    ("room", "marks"), [(8.0, [" MiB", " MiB, fits"]), (1.0, [" MiB", " MiB"]), (None, [" MiB"] * 2)]
)
def test_remedies_with_which_the_step_fits_are_marked(room, marks):
    found = out_of_memory._listed([remedies.Remedy("one.", 8.1), remedies.Remedy("two.", 7.9)], room)
    assert [line.split("  ")[2].strip("0123456789.") for line in found.splitlines()[1:]] == marks
    assert ("room for" in found) == (room is not None)


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_accumulation_that_is_on_goes_on(jit_compile):
    net = dense_net(2, jit_compile=jit_compile)
    batch.accumulate(net, 4)
    takes = estimate(net, SPECS)
    found = remedies._smaller_batch(net, takes, None)
    assert found.text == "tfopt.batch.accumulate(model, 8), with batches of 256 examples."
    assert found.mib == pytest.approx(takes.total_mib_at(256))
    assert remedies._smaller_batch(net, None, None).text.startswith(
        "tfopt.batch.accumulate(model, 8), with batches half"
    )


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_figure_of_accumulation_is_that_of_a_model_that_accumulates(jit_compile, dtype):
    keras.config.set_dtype_policy(dtype)
    net = dense_net(2, jit_compile=jit_compile)
    found = remedies._smaller_batch(net, estimate(net, SPECS), None)
    batch.accumulate(net, 2)
    assert found.mib == pytest.approx(estimate(net, SPECS).total_mib_at(256), rel=0.1)


def test_one_example_cannot_be_divided():
    net = dense_net(1)
    found = remedies._smaller_batch(net, estimate(net, tuple(tf.TensorSpec((1, *s.shape[1:])) for s in SPECS)), None)
    assert "the batch cannot be smaller" in found.text


@pytest.mark.slow
def test_what_others_hold_is_no_room(fake_nvml, monkeypatch):
    with_a_gpu(fake_nvml, monkeypatch, 1000)
    takes = estimate(dense_net(), SPECS)
    own = takes.weights_mib + takes.optimizer_mib
    usage = {"index": 0, "total_mib": 2000.0, "others_mib": None, "in_use_mib": own}
    room = [
        out_of_memory._room(takes, SimpleNamespace(**usage | change))
        for change in ({}, {"in_use_mib": own + 100}, {"others_mib": 1500.0}, {"total_mib": None})
    ]
    assert room == pytest.approx([900, 810, 450, 900])
    assert out_of_memory._room(takes, None) is None


@pytest.fixture
def no_remedies(monkeypatch):
    """Leaves out the remedies, whose figures take most of the time."""
    monkeypatch.setattr(out_of_memory, "remedies", lambda *_: [])


@pytest.mark.slow
@pytest.mark.usefixtures("no_remedies")
def test_gaps_are_named_where_the_step_would_fit(fake_nvml, monkeypatch):
    with_a_gpu(fake_nvml, monkeypatch, 1000)
    assert "By this estimate it would fit." in explanation(dense_net())


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["auto", "activations"])
def test_what_is_on_already_is_not_proposed(layers):
    net = dense_net(activation="gelu")
    assert "memory.recompute" in named(explanation(net))
    memory.recompute(net, layers)
    assert "memory.recompute" not in named(explanation(net))
    assert memory.undo(net)


@pytest.mark.slow
def test_the_logits_of_a_language_model(monkeypatch):
    net = language_nets.dense_net()
    tokens, labels = language_nets.tokens()
    net.optimizer.build(net.trainable_weights)
    net.train_function = failing(exhausted())
    monkeypatch.setattr(remedies, "_WORTHWHILE", 2.0)  # in so small a model it takes more
    monkeypatch.setattr(remedies, "_OTHERS", 9)
    arguments = {"x": tokens, "y": labels, "batch_size": 8}
    assert "kernels.chunk_cross_entropy" in named(explanation(net, **arguments))
    assert chunk_cross_entropy(net) == 1
    assert "kernels.chunk_cross_entropy" not in named(explanation(net, **arguments))


def test_what_is_faster_comes_first():
    texts = [text for text, _ in remedies._changes()]
    assert "use_flash_attention" in texts[0]
    assert 'recompute(model, "activations")' in texts[1]
    assert "chunk_cross_entropy" in texts[2]


@pytest.mark.slow
def test_what_saves_nothing_is_not_proposed(monkeypatch):
    monkeypatch.setattr(remedies, "_WORTHWHILE", 0.01)
    assert set(named(explanation(dense_net()))) == {"batch.accumulate"}


def datasets():
    examples = tf.data.Dataset.from_tensor_slices((X, Y))
    return {
        "batches": examples.batch(128).map(lambda x, y: (x, y)).prefetch(1),
        "full batches": examples.batch(128, drop_remainder=True),
        "sequence": Sequence(),
    }


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return X[:128], Y[:128]


@pytest.mark.usefixtures("no_remedies")
@pytest.mark.parametrize("name", ["batches", "full batches", "sequence"])
def test_batches_of_any_data(name):
    assert "A training step on 128 examples takes" in explanation(
        dense_net(2), x=datasets()[name], y=None, batch_size=None, shuffle=False
    )


@pytest.mark.slow
@pytest.mark.usefixtures("no_remedies")
def test_arrays_in_parts():
    assert "on 32 examples" in explanation(dense_net(2), batch_size=None)
    assert "on 512 examples" in explanation(dense_net(2), batch_size=1000)
    assert "on 64 examples" in explanation(dense_net(2), x=tf.constant(X), batch_size=64, sample_weight=Y[:, 0])
    net = dense_net(2)
    net.train_function = failing(exhausted())
    with pytest.raises(errors.OutOfMemoryError, match="on 100 examples"), explained_errors(net):
        net.train_on_batch(X[:100], Y[:100])


@since_keras("3.14")  # which can recompute segments
def test_remedies_without_figures_compile_nothing():
    found = explanation(dense_net(), x=(part for part in [(X, Y)]), y=None, shuffle=False)
    assert (
        "The step could not be estimated, so there are no figures: batches of a generator are of unknown size."
        in " ".join(found.split())
    )
    assert named(found) == {"xla.set_jit": None, "memory.recompute": None, "batch.accumulate": None}


@pytest.mark.slow
def test_a_figure_that_fails_is_left_out_compiled_or_not(monkeypatch):
    answers = iter([estimate(net := dense_net(), SPECS)])
    for module in (out_of_memory, remedies):
        monkeypatch.setattr(module, "estimate", lambda *_: next(answers))
    found = named(explanation(net))
    assert (found["xla.set_jit"], found["memory.recompute"]) == (None, None)
    assert found["batch.accumulate"] > 0


def interrupt(*_):
    raise KeyboardInterrupt


def fail(*_):
    raise RuntimeError


@pytest.mark.parametrize("disturbed", [interrupt, fail])
@pytest.mark.parametrize("where", ["usage", "remedies", "recompute"])
def test_the_original_is_never_hidden(monkeypatch, where, disturbed):
    net, error = dense_net(2), exhausted()
    step = net.train_function = failing(error)
    monkeypatch.setattr(remedies if where == "recompute" else out_of_memory, where, disturbed)
    with pytest.raises(tf.errors.ResourceExhaustedError) as raised, explained_errors(net):
        net.fit(X, Y, verbose=0)
    explained = where == "recompute" and disturbed is fail  # one remedy of several
    assert (raised.value is error) != explained
    assert net.train_function is step
    assert "fit" not in vars(net)


@pytest.mark.slow
def test_a_step_of_the_evaluation():
    net = dense_net(2)
    net.test_function = failing(exhausted())
    for call in (lambda: net.evaluate(X, Y, verbose=0), lambda: net.fit(X, Y, validation_data=(X, Y), verbose=0)):
        with pytest.raises(errors.OutOfMemoryError, match="a step of the evaluation") as raised, explained_errors(net):
            call()
        assert "validation_batch_size" in str(raised.value)
    net.predict_function = failing(exhausted())
    for call in (lambda: net.predict(X, verbose=0), lambda: net.predict_on_batch(X)):
        with pytest.raises(errors.OutOfMemoryError, match="a step of the prediction") as raised, explained_errors(net):
            call()
        assert "predict(..., batch_size=...)" in " ".join(str(raised.value).split())
        assert "checkpoint" not in str(raised.value)
    net.test_function, net.train_function = None, failing(exhausted())
    with explained_errors(net):
        net.evaluate(X, Y, verbose=0)
        with pytest.raises(tf.errors.ResourceExhaustedError) as raised:
            net.fit(X, Y, verbose=0)
        assert not isinstance(raised.value, errors.OutOfMemoryError)  # only what leaves the block


def test_a_step_of_the_training_after_a_validation():
    net = dense_net(2)
    steps = iter([lambda _: {"loss": 0.0}, failing(exhausted())])
    net.train_function = lambda iterator: next(steps)(iterator)
    with pytest.raises(errors.OutOfMemoryError, match="a training step"), explained_errors(net):
        net.fit(X, Y, batch_size=EXAMPLES, epochs=2, validation_data=(X, Y), verbose=0)


def test_nothing_is_left_on_the_model():
    net = dense_net(2)
    vars(net)["evaluate"] = own = net.evaluate
    with explained_errors(net):
        assert vars(net)["evaluate"] is not own
        net.fit(X, Y, verbose=0)
    assert vars(net)["evaluate"] is own
    assert "fit" not in vars(net)
    with pytest.raises(TypeError, match="nonsense"), explained_errors(net):
        net.fit(X, Y, nonsense=1)


def test_it_repairs_the_count_of_steps(monkeypatch):
    with explained_errors(dense_net(2)):
        assert repairs.FAILED_STEPS.installed
    repairs.remove("failed_steps")
    make_unknown(monkeypatch, repairs.FAILED_STEPS)
    with explained_errors(dense_net(2)):
        assert not repairs.FAILED_STEPS.installed

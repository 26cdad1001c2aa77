"""What is noted in graphs, and whether XLA compiles as often as is counted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from watched_functions import data, linear, total

from tfopt.xla import watch

NOTES = "LookupTableFindV2"  # only what is noted has one here
# Counts the lines that TensorFlow logs, one for each compilation.
SCRIPT = """
import json, os, tempfile, threading, warnings

log = tempfile.TemporaryFile()
os.dup2(log.fileno(), 2)
warnings.simplefilter("ignore")

import numpy as np
import tensorflow as tf
from watched_functions import data, linear, total

import tfopt

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


def logged():
    log.seek(0)
    return log.read().count(b"Compilation of XLA executable")


def counts(work):
    before = logged()
    with tfopt.xla.watch() as compilations:
        work()
    return logged() - before, compilations.count


def sizes():
    f = total()
    for size in (2, 3, 3, 4):
        f(tf.ones(size))


def gradients():
    f, x = total(), tf.Variable(tf.ones(5))
    for _ in range(2):
        with tf.GradientTape() as tape:
            y = f(x)
        tape.gradient(y, x)
    f(tf.ones(5))


def without_results():
    total = tf.Variable(0.0)
    step = tf.function(lambda x: [total.assign_add(tf.reduce_sum(x)), None][1], jit_compile=True)
    tf.function(lambda x: [step(x), None][1])(tf.ones(4))


def in_a_graph():
    f = total()

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return tape.gradient(y, x)

    @tf.function
    def epoch(dataset):
        for x in dataset:
            f(x)

    gradient(tf.ones(6))
    epoch(tf.data.Dataset.from_tensor_slices(tf.ones((20, 3))).batch(8))


def on_replicas():
    f, strategy = total(), tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    run = tf.function(lambda x: strategy.run(f, args=(x,)), reduce_retracing=True)
    for size in (2, 3, 3):
        strategy.run(f, args=(tf.ones(size),))
        run(tf.ones(size + 2))


def in_threads():
    threads = [threading.Thread(target=fit(linear(), 20)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def in_a_compiled_function():
    inner = total()
    tf.function(lambda x: inner(x) + inner(x[1:]), jit_compile=True)(tf.ones(4))


def fit(model, examples, size=8):
    return lambda: model.fit(data(examples, size), epochs=2, verbose=0, shuffle=False)


cases = dict(sizes=sizes, gradients=gradients, without_results=without_results, in_a_graph=in_a_graph)
cases |= dict(in_a_compiled_function=in_a_compiled_function, on_replicas=on_replicas, in_threads=in_threads)
one, three = linear(), linear(steps_per_execution=3)
cases |= {"fit": fit(one, 20), "the same again": fit(one, 20), "another size": fit(one, 7, 7)}
cases |= {"three steps": fit(three, 44), "three steps again": fit(three, 44)}
cases |= {
    "evaluate": lambda: three.evaluate(data(20), verbose=0),
    "predict": lambda: three.predict(np.ones((20, 4), "float32"), batch_size=8, verbose=0),
}
trained, overlapped = linear(), tfopt.fit.overlap(linear())
fit(trained, 20)()
cases |= {"traced before": fit(trained, 7, 7), "overlapped": fit(overlapped, 20)}
print(json.dumps({name: counts(work) for name, work in cases.items()}))
"""


@pytest.mark.slow
def test_xla_compiles_as_often_as_is_counted(tmp_path):
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2] / "support"), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "device_compiler=1"}
    script = tmp_path / "script.py"  # AutoGraph reads its source
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], env=environ, stdout=subprocess.PIPE, check=True)
    counts = json.loads(done.stdout)
    assert {name: counted for name, (_, counted) in counts.items()} == {
        name: compiled for name, (compiled, _) in counts.items()
    }
    assert counts["three steps"] == counts["evaluate"] == [2, 2]
    assert counts["the same again"] == counts["three steps again"] == [0, 0]
    assert counts["traced before"] == [1, 1]
    assert (counts["in_a_graph"][0], counts["in_threads"][0]) == (4, 6)


def operations(function):
    return [
        operation.type
        for concrete in function._list_all_concrete_functions()
        for operation in concrete.graph.get_operations()
    ]


def calling(f):
    """A function that calls a compiled one; no signature, so that it is traced as it is called."""
    return tf.function(lambda x: f(x), reduce_retracing=True)


def test_a_function_has_its_own_traces_back_after_a_watch():
    before = calling(total())
    before(tf.ones(3))
    traces = before._list_all_concrete_functions()
    inside = calling(total())
    with watch() as compilations:
        before(tf.ones(4))
        inside(tf.ones(3))
        assert NOTES in operations(before)
        assert NOTES in operations(inside)
    assert compilations.count == 2
    assert before._list_all_concrete_functions() == traces
    before(tf.ones(5))
    inside(tf.ones(5))
    assert NOTES not in operations(before) + operations(inside)
    with watch() as again:
        before(tf.ones(6))
    assert again.count == 1


def test_traces_that_are_not_called_are_left_alone():
    """They may be examined, or saved."""
    f = total()
    with watch() as compilations:
        concrete = calling(f).get_concrete_function(tf.TensorSpec([None]))
    assert NOTES not in [operation.type for operation in concrete.graph.get_operations()]
    assert compilations.count == 0


def test_what_a_compiled_function_calls_is_part_of_it():
    inner = total()
    with watch() as compilations:
        calling(tf.function(lambda x: inner(x) + inner(x[1:]), jit_compile=True))(tf.ones(4))
    assert [event.inputs for event in compilations.events] == [{0: "float32 (4,)"}]


def test_a_function_whose_caller_was_traced_inside_another():
    f = total()
    middle = calling(f)
    outer = tf.function(lambda x: middle(x) + 1.0, reduce_retracing=True)
    outer(tf.ones(3))
    with watch() as compilations:
        outer(tf.ones(4))
        tf.function(lambda x: middle(x) + 2.0)(tf.ones(5))
    assert compilations.count == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_a_signature_that_ran_before_the_first_watch_is_counted_when_it_runs_in_one():
    model = linear()
    model.fit(data(8), verbose=0, shuffle=False)
    with watch() as first:
        model.fit(data(8), verbose=0, shuffle=False)
    with watch() as second:
        model.fit(data(8), verbose=0, shuffle=False)
    assert (first.count, second.count) == (1, 0)
    assert first.events[0].cause == "its first run in a watch"


def test_what_fails_in_a_graph_is_not_counted():
    f = calling(tf.function(lambda x: tf.strings.as_string(x), jit_compile=True))
    with watch() as compilations, pytest.raises(tf.errors.InvalidArgumentError):
        f(tf.ones(2))
    assert compilations.count == 0


def drawing():
    """A function that is not compiled, calls one that is, and draws by TensorFlow's seed and by a generator."""
    f, generator = total(), tf.random.Generator.from_seed(1)
    tf.random.set_seed(1)

    @tf.function(reduce_retracing=True)
    def step(x):
        return f(x), tf.random.uniform([], seed=2), generator.uniform([])

    return lambda: [float(draw) for draw in step(tf.ones(3))[1:]]


def test_a_watch_restarts_stateful_draws_and_leaves_generators_alone():
    """docs/xla.md says so."""
    plain = drawing()
    expected = [plain() for _ in range(4)]
    watched = drawing()
    found = [watched(), watched()]
    with watch():
        found.append(watched())
    found.append(watched())
    assert [one for _, one in found] == [one for _, one in expected]
    stateful, as_ever = ([one for one, _ in draws] for draws in (found, expected))
    assert stateful == [as_ever[0], as_ever[1], as_ever[0], as_ever[2]]

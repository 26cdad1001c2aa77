"""benchmarks/models.py: its judge, that no tool is wrong on a model, and that docs/models.md shows the record."""

import json
import sys
from itertools import product
from types import SimpleNamespace

import harness
import keras
import numpy as np
import pytest
import tensorflow as tf
from model_cases import table as whole
from model_cases import tools
from model_cases.counted import counted_flops
from model_cases.table import NETS, RESULTS, begun, counts, main, table
from model_cases.tools import NOTHING, REFUSED, SAME, TOOLS, WRONG, Found, found
from model_cases.training import EXAMPLES, Net, Training

layers = keras.layers
RECORDED = json.loads(RESULTS.read_text(encoding="utf-8"))
QUICK = [
    ("attention", "overlap"),
    ("attention", "flash attention"),
    ("attention", "alignment"),
    ("attention", "fused batch norm"),
]
_random = np.random.default_rng(0)
X, Y = _random.normal(size=(EXAMPLES, 6)).astype("float32"), _random.integers(3, size=EXAMPLES)


def compiled(*body):
    model = keras.Sequential([keras.Input((6,)), *body, layers.Dense(3, name="head")], name="tiny")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, jit_compile=False)
    return model, (X, Y)


def normed():
    row = [layer for _ in range(4) for layer in (layers.Dense(8, "relu"), layers.BatchNormalization())]
    return compiled(*row)


class Attending(layers.Layer):
    """Self-attention as one argument."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(1, 4)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x)


def attention():
    return compiled(layers.Reshape((2, 3)), Attending(), layers.Flatten())


TINY = {"normed": Net("normed", normed), "attention": Net("attention", attention)}


@pytest.fixture(scope="module")
def trainings():
    return {name: Training(net) for name, net in TINY.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Expected (attention that cuDNN|a layer with a method)")
@pytest.mark.parametrize(
    ("name", "tool"),
    [pytest.param(*row, marks=[] if row in QUICK else pytest.mark.slow) for row in product(TINY, TOOLS)],
)
def test_no_tool_is_wrong_on_tiny_models(trainings, name, tool):
    cell = found(trainings[name], tool)
    nothing = {("normed", "flash attention"), ("attention", "fused batch norm")}
    assert cell.verdict == (NOTHING if (name, tool) in nothing else SAME), cell


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NETS)
def test_every_cell_is_as_recorded(name):
    pytest.importorskip(NETS[name].needs or "keras")
    cells = {}
    whole.tried(name, list(TOOLS), cells.__setitem__)
    recorded = RECORDED["models"][name]
    assert {tool: cell["verdict"] for tool, cell in cells.items()} == {
        tool: cell["verdict"] for tool, cell in recorded.items()
    }


def test_the_recorded_run_is_whole_and_in_the_docs():
    assert RECORDED["status"] == "complete"
    assert RECORDED["environment"]["packages"]["keras-hub"]
    assert list(RECORDED["models"]) == list(NETS)
    assert all(set(cells) == set(TOOLS) for cells in RECORDED["models"].values())
    page = whole.PAGE.read_text(encoding="utf-8")
    assert harness.filled(page, "models", table(RECORDED)) == page


def test_no_tool_is_wrong_in_the_recorded_run():
    wrong = [
        (name, tool, cell)
        for name, cells in RECORDED["models"].items()
        for tool, cell in cells.items()
        if cell["verdict"] not in (SAME, REFUSED, NOTHING)
    ]
    assert wrong == []


class Nudge(keras.callbacks.Callback):
    """Changes a weight a little, as a tool that computes something else would."""

    def __init__(self, share):
        super().__init__()
        self.share = share

    def on_train_begin(self, logs=None):
        weight = self.model.trainable_variables[0]
        weight.assign(weight * (1 + self.share))


@pytest.mark.slow
def test_the_judge_tells_rounding_from_another_training(trainings):
    training = trainings["normed"]
    rounded, changed = (training.fit(training.build(), Nudge(share)) for share in (2**-23, 1e-4))
    assert training.same_bits(training.fit(training.build())) is None
    assert "loss is" in training.same_bits(changed)
    assert training.same_bits(rounded)
    assert training.same_to_rounding(rounded) is None
    assert "away" in training.same_to_rounding(changed)
    assert training.same_losses(changed, "float16") is None
    assert "in float32" in training.same_losses(training.fit(training.build(), Nudge(9.0)), "float16")


@pytest.mark.parametrize(
    ("tool", "verdict"),
    [
        (lambda training: tools._judged("the loss is another"), WRONG),
        (lambda training: 1 / 0, WRONG),
        (lambda training: int("Expected"), WRONG),
        (lambda training: training.refuse(), REFUSED),
        (lambda training: tools._judged(None), SAME),
    ],
)
def test_crashes_are_wrong_and_explanations_refusals(monkeypatch, tool, verdict):
    class Refusing:
        stock = None

        def refuse(self):
            raise tools.tfopt.errors.UnsupportedError("Expected this. Found that. Do it otherwise.")

    monkeypatch.setitem(TOOLS, "tool", tool)
    assert found(Refusing(), "tool").verdict == verdict


def test_models_that_fail_by_themselves_are_not_blamed_on_tfopt():
    def make():
        raise RuntimeError("no such backbone")

    cell = found(Training(Net("broken", make)), "overlap")
    assert cell == Found(tools.FAILS, "", "RuntimeError: no such backbone")


def test_what_is_wrong_once_is_named(monkeypatch):
    cells = [Found(WRONG, "one bit"), Found(SAME, "2 of 2")]
    monkeypatch.setitem(TOOLS, "tool", lambda training: cells.pop(0))
    training = SimpleNamespace(stock=None)
    assert found(training, "tool") == Found(SAME, "2 of 2 only in a second run", "one bit")


def test_flops_by_hand():
    x, kernel, picture, window = (
        tf.ones((4, 6)),
        tf.Variable(tf.ones((6, 5))),
        tf.ones((1, 8, 8, 3)),
        tf.ones((3, 3, 3, 2)),
    )
    assert counted_flops(lambda: x @ kernel) == 2 * 4 * 6 * 5
    assert counted_flops(lambda: tf.linalg.matmul(x, x, transpose_a=True)) == 2 * 6 * 6 * 4
    assert counted_flops(lambda: tf.einsum("ab,bc->ac", x, kernel)) == 2 * 4 * 6 * 5
    assert counted_flops(lambda: tf.nn.conv2d(picture, window, 2, "SAME")) == 2 * 4 * 4 * 3 * 3 * 3 * 2
    assert counted_flops(lambda: tf.function(lambda: x @ kernel)()) == 2 * 4 * 6 * 5

    def gradient():
        with tf.GradientTape() as tape:
            tape.watch(x)
            product = x @ kernel
        tape.gradient(product, [x, kernel])  # nobody needs these
        kernel.assign_add(tf.ones_like(kernel))
        return product

    assert counted_flops(gradient) == 2 * 4 * 6 * 5
    assert tf.config.functions_run_eagerly() is False


def test_the_table_has_notes():
    cells = {
        "XLA": {"verdict": REFUSED, "said": "", "why": "Expected this | that."},
        "overlap": {"verdict": SAME, "said": "", "why": "no note"},
        "bfloat16": {"verdict": SAME, "said": "2 in float32", "why": "It overflows."},
        "FLOPs": {"verdict": WRONG, "said": "1.2", "why": ""},
    }
    text = table({"models": {"net": cells, "other": {"XLA": cells["XLA"]}}})
    assert "| net | same, 2 in float32 (1) |  | refused (2) | same |  |  |  | WRONG (3) |  |  |" in text
    assert "| other |  |  | refused (2) |" in text
    assert "\n1. It overflows.\n2. Expected this / that.\n3. 1.2\n" in text
    assert "2 models and 10 tools: 2 times the same training, 2 times refused" in counts(
        {"models": {"net": cells, "other": {"XLA": cells["XLA"]}}}
    )


def dying(send, name, tools):
    for tool in tools:
        if tool == "XLA":
            sys.exit(3)
        send((tool, Found(SAME)._asdict()))


@pytest.mark.slow
def test_a_cell_at_which_the_process_ends_is_wrong_and_the_others_go_on(monkeypatch, tmp_path):
    path = tmp_path / "results.json"
    monkeypatch.setattr(whole, "try_tools", dying)
    monkeypatch.setattr(sys, "argv", ["models.py", str(path), "--only", "VAE"])
    main()
    cells = json.loads(path.read_text())["models"]["VAE"]
    assert {tool for tool, cell in cells.items() if cell["verdict"] == WRONG} == {"XLA"}
    assert "ended with code 3" in cells["XLA"]["said"]
    assert list(cells) == list(TOOLS)


def test_results_of_other_versions_are_not_taken(tmp_path):
    path, document = tmp_path / "results.json", begun(tmp_path / "none.json")
    document["models"] = {"VAE": {}}
    path.write_text(json.dumps(document))
    assert begun(path) == document
    document["environment"]["packages"]["keras"] = "3.0"
    path.write_text(json.dumps(document))
    assert begun(path)["models"] == {}

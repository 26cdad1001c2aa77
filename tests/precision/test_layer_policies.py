import keras
import pytest

from tfopt.errors import UnsupportedError
from tfopt.model.layers import layer_paths
from tfopt.precision.layer_policies import assign_policies, current_policy, under_policies

layers = keras.layers
Map = keras.dtype_policies.DTypePolicyMap


def model(policy="float32"):
    with_policy = {"dtype": policy}
    inputs = keras.Input((6, 8), name="x")
    x = layers.MultiHeadAttention(2, 4, name="attention", **with_policy)(inputs, inputs)
    block = keras.Sequential(
        [layers.Dense(8, name="d", **with_policy), layers.Dense(4, name="e", **with_policy)], name="block"
    )
    x = layers.Bidirectional(layers.LSTM(3, name="lstm", **with_policy), name="both", **with_policy)(block(x))
    return keras.Model(inputs, layers.Dense(2, name="d", **with_policy)(x), name="net")


def names(model, policy):
    paths = layer_paths(model)
    return {paths[layer]: policy.name for layer, policy in assign_policies(model, policy).policies.items()}


def test_paths_lead_from_the_model_down_and_are_unlike():
    paths = list(layer_paths(model()).values())
    assert {"net", "d", "block/d", "attention/query", "both/forward_lstm/lstm_cell"} <= set(paths)
    assert len(set(paths)) == len(paths)
    unbuilt = keras.Sequential([layers.Dense(3, name="one"), layers.Dense(4, name="two")], name="lazy")
    assert list(layer_paths(unbuilt).values()) == ["lazy", "one", "two"]


@pytest.mark.parametrize("policy", ["mixed_float16", keras.DTypePolicy("mixed_float16")])
def test_one_policy_goes_to_all_but_outputs_and_inputs(policy):
    found = names(model(), policy)
    assert found.pop("d") == "float32"
    assert set(found.values()) == {"mixed_float16"}
    assert "x" not in found
    assert {"block/d", "attention/query", "both/backward_lstm/lstm_cell"} <= set(found)


def test_outputs_made_in_16_bits_go_to_float32():
    assert names(model("mixed_float16"), "mixed_float16")["d"] == "float32"


def test_auto_is_what_is_recommended(monkeypatch):
    monkeypatch.setattr("tfopt.hardware.gpus", lambda: ())
    assert set(names(model("mixed_bfloat16"), "auto").values()) == {"float32"}


def test_paths_go_before_names_and_names_before_expressions():
    found = names(model(), {".*": "mixed_bfloat16", "block/d": "mixed_float16", "lstm_cell": "float32"})
    assert (found["block/d"], found["block/e"]) == ("mixed_float16", "mixed_bfloat16")
    assert (found["both/forward_lstm/lstm_cell"], found["both/forward_lstm"]) == ("float32", "mixed_bfloat16")
    assert found["d"] == "float32"  # it makes the output, and only an expression matches it
    # A path is meant even where it is a name as well, and whoever names an output gets it.
    found = names(model(), {"d": "mixed_float16"})
    assert (found["d"], found["block/d"]) == ("mixed_float16", "float32")


def test_a_layer_hands_its_policy_down_and_the_unnamed_keep_theirs():
    found = names(model("mixed_bfloat16"), {"attention": "mixed_float16", "attention/query": "float32"})
    assert found["attention/query"] == "float32"
    assert found["attention/key"] == found["attention/value"] == "mixed_float16"
    assert found["block"] == "float32"  # a Sequential made outside of any mixed policy
    assert found["block/d"] == "mixed_bfloat16"


def test_a_policy_map_gives_the_unnamed_its_default():
    policy_map = Map("mixed_bfloat16", {"block/.*": keras.DTypePolicy("mixed_float16")})
    found = names(model(), policy_map)
    assert (found["block/d"], found["block/e"]) == ("mixed_float16", "mixed_float16")
    assert (found["attention/key"], found["d"]) == ("mixed_bfloat16", "float32")


def test_keras_own_paths_are_understood():
    """In a Sequential model, Keras' path begins with the model's name."""
    small = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="a"), layers.Dense(2, name="b")], name="s")
    assert small.get_layer("a").path == "s/a"
    assert names(small, {"s/a": "mixed_bfloat16"}) == {"s": "float32", "a": "mixed_bfloat16", "b": "float32"}


def test_keras_own_map_matches_nothing_for_a_bare_name_and_tfopt_says_so():
    """A key that Keras would overlook is understood; one that no layer has is an error with the nearest names."""
    policy_map = Map("float32", {"query": keras.DTypePolicy("mixed_float16")})
    with_map = layers.MultiHeadAttention(2, 4, name="attention", dtype=policy_map)
    inputs = keras.Input((6, 8))
    stock = keras.Model(inputs, with_map(inputs, inputs))
    assert all(layer.compute_dtype == "float32" for layer in stock._flatten_layers())
    assert names(model(), {"query": "mixed_float16"})["attention/query"] == "mixed_float16"
    with pytest.raises(ValueError, match=r"'attention/qery', which matches no layer\. Did you mean 'attention/query'"):
        assign_policies(model(), {"attention/qery": "mixed_float16"})
    with pytest.raises(ValueError, match=r"matches no layer"):
        assign_policies(model(), {"(": "mixed_float16"})


def test_layers_of_integers_and_constants_are_left_alone():
    inputs = keras.Input((3,))
    x = layers.Discretization(bin_boundaries=[0.0, 1.0], dtype="int32")(
        layers.Normalization(mean=0.0, variance=1.0)(inputs)
    )
    x = layers.Flatten()(layers.Embedding(3, 4)(x))
    net = keras.Model(inputs, layers.Dense(2)(x))
    found = assign_policies(net, "mixed_float16").policies
    kinds = {type(layer) for layer in found}
    assert kinds == {type(net), layers.Embedding, layers.Flatten, layers.Dense}
    for name in (layer.name for layer in net.layers[:3]):
        with pytest.raises(ValueError, match=rf"a policy for {name}: an input, or .*\. Leave it out"):
            assign_policies(net, {name: "mixed_float16"})


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("mixed_bfloat", r"Received: 'mixed_bfloat'\. Did you mean 'mixed_bfloat16'\?"),
        ({"d": "mixed"}, r"Received: 'mixed'"),
        ({"both/.*": "float32", ".*lstm_cell": "mixed_float16"}, r"both match 'both/forward_lstm/lstm_cell'\. Name"),
    ],
)
def test_a_wrong_policy(policy, message):
    with pytest.raises(ValueError, match=message):
        assign_policies(model(), policy)


@pytest.mark.parametrize("policy", [16, None, {"d": None}])
def test_neither_a_name_nor_a_policy(policy):
    with pytest.raises(TypeError, match=r"Expected a dtype policy: a name .* Received: .*\. Pass 'auto' for what"):
        assign_policies(model(), policy)


class Empty(keras.Model):
    def call(self, inputs):
        return inputs


@pytest.mark.parametrize("make", [Empty, keras.Sequential, lambda: keras.Sequential([keras.Input((2,))])])
def test_a_model_without_layers(make):
    with pytest.raises(ValueError, match=r"has none\. Add layers first"):
        assign_policies(make(), "mixed_float16")


@pytest.mark.parametrize("policy", ["bfloat16", "float16", "float64", {"block": "float16"}])
def test_weights_in_another_dtype_cannot_be_had_in_place(policy):
    with pytest.raises(UnsupportedError, match=r"keeps weights in float32, as .* Use float32, mixed_bfloat16 or"):
        assign_policies(model(), policy)
    assert set(names(keras.Sequential([layers.Dense(2), layers.Dense(2, name="b")]), "bfloat16").values()) == {
        "bfloat16",
        "float32",
    }


def test_quantized_layers_are_named():
    net = model()
    net.get_layer("block").get_layer("d").quantize("float8")
    with pytest.raises(UnsupportedError, match=r"Found: block/d\. Quantization cannot be undone"):
        assign_policies(net, "mixed_bfloat16")
    assert names(net, {"attention": "mixed_bfloat16"})["block/d"] == "float8_from_float32"


def test_computing_puts_the_very_objects_back():
    net = model()
    own = Map("float32", {"attention/query": keras.DTypePolicy("mixed_bfloat16")})
    net.get_layer("attention")._dtype_policy = own
    before = {layer: layer._dtype_policy for layer in net._flatten_layers()}
    weights = [variable.numpy().tobytes() for variable in net.variables]
    policies = assign_policies(net, "mixed_float16").policies

    def inside():
        with under_policies(net, policies):
            assert all(layer.compute_dtype == policy.compute_dtype for layer, policy in policies.items())
            net.get_layer("d")._dtype_policy = keras.DTypePolicy("float64")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        inside()
    assert all(layer._dtype_policy is policy for layer, policy in before.items())
    assert len(own) == 1
    assert [variable.numpy().tobytes() for variable in net.variables] == weights
    assert all(variable.dtype == "float32" for variable in net.trainable_variables)


def test_the_policy_of_a_layer_with_a_map_is_its_own_entry():
    own = Map("float32", {"dense_of_map": keras.DTypePolicy("mixed_bfloat16")})
    layer = layers.Dense(2, dtype=own, name="dense_of_map")
    assert current_policy(layer).name == "float32"  # without a path no entry is its own
    layer.build((None, 3))
    assert current_policy(layer).name == "mixed_bfloat16"

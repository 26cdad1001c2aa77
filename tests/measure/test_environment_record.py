import json

import keras
import tensorflow as tf

import tfopt
from tfopt.measure import environment


def test_what_is_recorded():
    found = environment({})
    json.dumps(found, allow_nan=False)
    assert found["tfopt"] == tfopt.__version__
    assert found["packages"]["tensorflow"] == tf.__version__
    assert found["packages"]["keras"] == keras.__version__
    assert found["settings"]["dtype_policy"] == "float32"
    assert found["host"]["cpus"] == tfopt.hardware.host().cpus
    assert len(found["devices"]) == len(tf.config.list_logical_devices())
    assert found["variables"] == {}


def test_only_variables_that_matter_are_recorded():
    matter = {"XLA_FLAGS": "--x", "CUDA_VISIBLE_DEVICES": "0", "TF_ENABLE_ONEDNN_OPTS": "0", "NCCL_DEBUG": "INFO"}
    private = {
        "TF_TOKEN_app": "secret",
        "TF_VAR_password": "secret",
        "TF_CLI_CONFIG_FILE": "x",
        "HOME": "x",
        "PATH": "x",
    }
    assert environment({**matter, **private})["variables"] == matter


def test_a_setting_is_read_when_asked():
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert environment()["settings"]["dtype_policy"] == "mixed_bfloat16"

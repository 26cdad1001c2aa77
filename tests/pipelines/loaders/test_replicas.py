"""Loaders under MirroredStrategy, on two logical CPU devices in a process of their own."""

import textwrap

import pytest
from python_child import run_python

TWO_REPLICAS = textwrap.dedent("""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfopt

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tfopt.distribute.strategy("mirrored")
    keras.config.set_floatx("float64")
    COUNT, BATCH, EPOCHS = 21, 4, 2  # the last batch has one example, for one of the replicas
    x, y = np.random.default_rng(0).random((COUNT, 3)), np.arange(COUNT) / COUNT


    class Pairs(keras.utils.PyDataset):
        def __len__(self):
            return -(-COUNT // BATCH)

        def __getitem__(self, index):
            rows = slice(BATCH * index, BATCH * index + BATCH)
            return x[rows], y[rows]


    def batches():
        return map(Pairs().__getitem__, range(len(Pairs())))


    class Recording(keras.Sequential):
        def train_step(self, data):
            tf.numpy_function(lambda labels: seen.extend(labels.ravel().tolist()), [data[1]], [])
            return super().train_step(data)


    def made():
        model = Recording([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=False)
        return model


    seen = []
    alone = made()
    for _ in range(EPOCHS):
        for batch in batches():
            alone.train_on_batch(*batch)
    for data, options in ((Pairs(workers=2), {"shuffle": False}), (batches, {})):
        for prepare in (lambda model: None, tfopt.fit.overlap):
            with strategy.scope():
                model = made()
            prepare(model)
            seen.clear()
            model.fit(tfopt.pipelines.build_pipeline(data, **options), epochs=EPOCHS, verbose=0)
            assert sorted(seen) == sorted([*y] * EPOCHS)
            assert int(model.optimizer.iterations.numpy()) == EPOCHS * len(Pairs())
            for ours, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
                np.testing.assert_allclose(ours, expected, rtol=1e-9)
    print("trained on", strategy.num_replicas_in_sync)
""")


@pytest.mark.slow
def test_two_replicas_train_as_one_device_on_the_same_batches():
    assert "trained on 2" in run_python(TWO_REPLICAS)

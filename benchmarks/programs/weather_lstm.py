"""An LSTM that forecasts a time series from sliding windows, with callbacks that stop early and keep the best."""

import tempfile

import keras
import numpy as np

keras.utils.set_random_seed(0)
hours = np.arange(8_000)
series = np.stack([np.sin(hours / period) for period in (4, 24, 168, 700)], axis=1)
series = (series + np.random.normal(scale=0.1, size=series.shape)).astype("float32")


def windows(begin, end):
    return keras.utils.timeseries_dataset_from_array(
        series[begin : end - 12], series[begin + 72 : end, 0], sequence_length=60, batch_size=32, shuffle=True, seed=0
    )


inputs = keras.Input((60, 4))
model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.LSTM(32)(inputs)))
model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="mse")
best = keras.callbacks.ModelCheckpoint(f"{tempfile.mkdtemp()}/best.keras", monitor="val_loss", save_best_only=True)
stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=3)
model.fit(windows(0, 6_000), epochs=5, validation_data=windows(6_000, 8_000), callbacks=[best, stop])

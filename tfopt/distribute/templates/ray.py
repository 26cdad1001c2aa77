"""A Keras training on a Ray cluster. Print it, fill in what is marked SITE, submit it:

    python -m tfopt.distribute.template ray > training.py      # any name but ray.py, which would hide Ray itself
    ray job submit --address http://HEAD:8265 --working-dir . -- python training.py

On one machine, `python training.py` starts a Ray of its own. All nodes need the same versions of Python, Ray, tfopt,
TensorFlow and Keras.
"""

from typing import Any

from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

from tfopt.distribute.ray import report_checkpoints, restore, trainer

# SITE: how many workers, and what each takes. One GPU a worker trains best; with several, TensorFlow mirrors the model
# on them. CPU cores feed the GPU: take those of a node, divided by its GPUs.
WORKERS = 2
RESOURCES: dict[str, float] = {"CPU": 1}  # with GPUs: {"CPU": 8, "GPU": 1}
# A part of a GPU ("GPU": 0.5) is Ray's bookkeeping alone: both workers see the whole GPU, share its memory without a
# limit and slow each other down. NCCL refuses two workers on one GPU. Where the nodes have MIG, start each node's Ray
# with CUDA_VISIBLE_DEVICES=MIG-…,MIG-… and ask for "GPU": 1, which is then one instance.

# SITE: where metrics and checkpoints go. With several nodes all must reach it: a shared folder, or "s3://bucket/runs".
STORAGE = "/tmp/ray-runs"
# SITE: a name of this training. If it has been run before under this name, it goes on from the last checkpoint.
NAME = "training"

# SITE: more shared memory, which NCCL takes between the GPUs of a node: in containers `docker run --shm-size=16g`. For
# the network between nodes give every worker NCCL_SOCKET_IFNAME, in `ray.init(runtime_env={"env_vars": {…}})`.


def data() -> tuple[Any, Any]:
    """SITE: your data; here points, and the sum of their parts."""
    import numpy as np

    x = np.random.default_rng(0).random((1024, 8), dtype="float32")
    return x, x.sum(axis=1, keepdims=True)


def make_model() -> Any:
    """SITE: your model, compiled."""
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    return model


def train(config: dict[str, Any]) -> None:
    """Runs in every worker. TensorFlow is imported here: the script that is submitted does without GPUs."""
    import tfopt

    strategy = tfopt.distribute.strategy("auto")  # before anything else of TensorFlow
    with strategy.scope():
        model = make_model()
    x, y = data()
    model.fit(
        x,
        y,
        batch_size=64,  # of all workers together
        epochs=config["epochs"],
        initial_epoch=restore(model),  # 0, or what a lost worker has left
        shuffle=False,  # the data are in random order, and after a restart in the same one
        callbacks=[report_checkpoints(model)],
        verbose=0,
    )


def main() -> None:
    """Trains. A worker that is lost ends the others with exit code 75; Ray then starts all of them again."""
    run = trainer(
        train,
        train_loop_config={"epochs": 5},
        scaling_config=ScalingConfig(
            num_workers=WORKERS, use_gpu="GPU" in RESOURCES, resources_per_worker=RESOURCES, placement_strategy="PACK"
        ),
        run_config=RunConfig(
            name=NAME,
            storage_path=STORAGE,
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            # Ray does not tell exit codes apart: an error of your own is tried as often as a lost worker.
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    result = run.fit()
    print(result.metrics, result.checkpoint)  # noqa: T201


if __name__ == "__main__":
    main()

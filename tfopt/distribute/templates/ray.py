"""A Keras training on a Ray cluster. Print it, fill in what is marked SITE, submit it:

    python -m tfopt.distribute.template ray > training.py      # any name but ray.py, which would hide Ray itself
    ray job submit --address http://HEAD:8265 --working-dir . -- python training.py

On one machine, `python training.py` starts Ray itself. All nodes need the same versions of Python, Ray, tfopt,
TensorFlow and Keras.
"""

import os
from typing import Any

from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

from tfopt.distribute.ray import report_checkpoints, restore, trainer

# SITE: how many workers, and what each takes. One GPU per worker trains best; with several, TensorFlow mirrors the
# model on them. CPU cores feed the GPU: take a node's, divided by its GPUs.
WORKERS = 2
RESOURCES: dict[str, float] = {"CPU": 1}  # with GPUs: {"CPU": 8, "GPU": 1}
# A fraction of a GPU ("GPU": 0.5) is only Ray's bookkeeping: both workers see the whole GPU, share its memory without
# limit and slow each other down, and NCCL refuses two workers on one GPU. With MIG, start each node's Ray with
# CUDA_VISIBLE_DEVICES=MIG-…,MIG-… and ask for "GPU": 1, which is then one instance.

# SITE: where metrics and checkpoints go. All nodes must reach it: a shared folder, or "s3://bucket/runs".
STORAGE = "/tmp/ray-runs"
# SITE: this training's name. A training of that name resumes from its last checkpoint.
NAME = "training"

# SITE: NCCL needs shared memory between the GPUs of a node: in containers `docker run --shm-size=16g`. For the network
# between nodes, set NCCL_SOCKET_IFNAME in every worker: `ray.init(runtime_env={"env_vars": {…}})`.


def data() -> tuple[Any, Any]:
    """SITE: your data; here vectors and their sums."""
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
    """Runs in every worker. TensorFlow is imported here, since the submitted script itself needs no GPU."""
    import tfopt

    # SITE: a worker that makes no progress for so long is ended, and Ray restarts all of them.
    os.environ.setdefault("TFOPT_WATCH_PROGRESS_SECONDS", "3600")
    strategy = tfopt.distribute.strategy("auto")  # before anything else of TensorFlow
    with strategy.scope():
        model = make_model()
        # Each worker reads its part. batch_size is that of all together. The data are in random order already.
        dataset = tfopt.pipelines.build_pipeline(data(), batch_size=64, shuffle=False)
    model.fit(
        dataset,
        epochs=config["epochs"],
        initial_epoch=restore(model),  # 0, or the epochs of the last checkpoint
        callbacks=[report_checkpoints(model)],
        verbose=0,
    )


def main() -> None:
    """Trains. A lost worker ends the others with exit code 75; Ray then restarts all of them."""
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
            # Ray does not distinguish exit codes: it retries an error in your script as often as a lost worker.
            # Preempted nodes count separately, by default without limit (an older Ray does not know that argument).
            failure_config=FailureConfig(max_failures=3, max_preemption_failures=20),
        ),
    )
    result = run.fit()
    print(result.metrics, result.checkpoint)  # noqa: T201


if __name__ == "__main__":
    main()

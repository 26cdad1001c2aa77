"""Trains a small net on handwritten digits and continues after a preemption as if there had been none.

    python examples/preempted.py            # trains twice: undisturbed, and preempted in its third epoch
    python examples/preempted.py FOLDER     # trains, with checkpoints in the folder

On two nodes under Slurm, with a folder that both can reach and only this training uses:

    python -m tfopt.distribute.template slurm > slurm.sh    # fill in the partition, the GPUs and the time
    sbatch slurm.sh python preempted.py /shared/digits

Two minutes before the time limit, or when another job needs the nodes, Slurm sends SIGTERM to every process. They save
after the same step and exit with code 75. Slurm restarts the job, which continues after that step. docs/clusters.md has
the details, also for Kubernetes. Needs scikit-learn: `pip install '.[bench]'`.
"""

import signal
import subprocess
import sys
import tempfile

RESTART = 75


def train(folder):
    """Runs as the job."""
    import tfopt

    strategy = tfopt.distribute.strategy("auto")  # before TensorFlow does anything else

    import keras
    from sklearn.datasets import load_digits

    from tfopt.callbacks import TrainingCheckpoint
    from tfopt.pipelines import build_pipeline

    digits = load_digits()
    x, y = (digits.data / 16).astype("float32"), digits.target.astype("int32")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(10),
            ]
        )
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        dataset = build_pipeline((x, y), batch_size=64, seed=0, remainder="drop")
    losses = model.fit(dataset, epochs=20, verbose=2, callbacks=[TrainingCheckpoint(folder)]).history["loss"]
    print(f"loss after {len(losses)} epochs: {losses[-1]}")


def schedule(folder, preempted_at=None):
    """Acts as the scheduler: starts the job, sends SIGTERM, restarts it. Returns the job's last line."""
    while True:
        job = subprocess.Popen([sys.executable, __file__, folder], stdout=subprocess.PIPE, text=True)
        line = ""
        for line in job.stdout:
            print(line, end="")
            if preempted_at and line.startswith(preempted_at):
                print("A more important job needs this machine.")
                job.send_signal(signal.SIGTERM)
        code, preempted_at = job.wait(), None
        if code != RESTART:
            return line if code == 0 else sys.exit(f"Expected exit code 0 or {RESTART}. Found {code}.")


def main():
    """Trains undisturbed, then preempted, and compares."""
    with tempfile.TemporaryDirectory() as folder:
        whole, preempted = schedule(f"{folder}/whole"), schedule(f"{folder}/preempted", preempted_at="Epoch 3/")
    if whole != preempted:
        sys.exit(f"Expected the same last line. Found {whole!r} and {preempted!r}.")
    print("The preempted training ended with the same loss.")


if __name__ == "__main__":
    train(sys.argv[1]) if len(sys.argv) > 1 else main()

"""GPT-2 with its loss in pieces and its activations recomputed: the memory of a step and its time, beside Keras' own.

    python benchmarks/chunked_loss.py [RESULTS.json] [--tiny]

On a GPU: GPT-2 124M, batch 16 × 1024, mixed_bfloat16 and flash attention. Else: 2 blocks of width 128, batch 2 × 512,
float32. Both under XLA. Of each step, it reads the program's bytes and its largest value from XLA's buffer assignment,
on a GPU also the peak that TensorFlow's allocator saw, and then times all in turn; on a CPU by CPU time too, which
other programs disturb less. With --tiny, it takes little time, to see that it runs.
"""

import os
import re
import tempfile
import time
from functools import partial
from pathlib import Path

import harness
import keras
import tensorflow as tf

from tfopt import kernels, measure, memory, precision
from tfopt.bench.workloads import gpt2
from tfopt.hardware.gpu_memory import first_gpu, in_use_bytes, peak_bytes, reset_peak

MIB = 2**20
PLAIN = "Keras' own"
# Name: pieces of the loss, and whether the element-wise activations are computed again.
ARMS = {
    PLAIN: (None, False),
    "activations": (None, True),
    "auto": ("auto", False),
    "4 pieces": (4, False),
    "16 pieces": (16, False),
    "activations, 4 pieces": (4, True),
}


def workload(on_gpu, tiny):
    """Arguments of the model, its batch, and the dtype policy."""
    if on_gpu:
        return {}, 16, "mixed_bfloat16"
    small = {"blocks": 2, "width": 128, "heads": 4, "vocabulary": 50257, "length": 512}
    return small | ({"vocabulary": 5000, "length": 256} if tiny else {}), 2, "float32"


def program(folder, known):
    """Bytes of the program that was compiled last, and its largest value, as XLA assigned them."""
    files = set(Path(folder).glob("*buffer-assignment.txt")) - known
    text = max((file.read_text(encoding="utf-8") for file in files), key=len)
    known |= files
    allocations = [int(size) for size in re.findall(r"^allocation \d+: size (\d+)", text, re.MULTILINE)]
    values = [(int(size), shape) for size, shape in re.findall(r"size=(\d+),offset=\d+\): (\w+\[[\d,]*\])", text)]
    size, shape = max(values)
    return {"program_mib": sum(allocations) / MIB, "largest_value_mib": size / MIB, "largest_value": shape}


def measured(folder, tiny):
    """Each arm's memory and times, as JSON."""
    turns, steps = (1, 1) if tiny else (8, 4)
    gpu, known, figures, timers = first_gpu(), set(), {}, {}
    sizes, examples, policy = workload(gpu is not None, tiny)
    batch = gpt2.batch(examples, **{name: sizes[name] for name in ("vocabulary", "length") if name in sizes})
    tokens, classes = batch[0].size, sizes.get("vocabulary", gpt2.VOCABULARY)
    for name, (chunks, again) in ARMS.items():
        before = in_use_bytes(gpu) if gpu else 0
        keras.utils.set_random_seed(0)
        with precision.policy(policy):
            model = gpt2.model(**sizes, jit_compile=True)
        if gpu:
            kernels.use_flash_attention(model)
        if chunks is not None and kernels.chunk_cross_entropy(model, chunks) != 1:
            raise RuntimeError("Expected a model in pieces. Found one that was refused. See the warning above.")
        if again:
            memory.recompute(model, "activations")
        timer = measure.StepTimer(model, batch)
        figure = {"loss": float(timer.results()["loss"])} | program(folder, known)
        if gpu:
            reset_peak(gpu)
            timer.results()
            figure["peak_mib"] = (peak_bytes(gpu) - before) / MIB
        figures[name] = figure
        timers[name] = [timer] if gpu else [timer, measure.StepTimer(model, batch, clock=time.process_time)]
        print(f"{name:21}", ", ".join(f"{key} {value}" for key, value in figure.items()), flush=True)
    for place, clock in enumerate(("wall", "cpu")[: 1 if gpu else 2]):
        clocked = {name: partial(each[place], steps, warmup=1, samples=1) for name, each in timers.items()}
        times = measure.interleave(clocked, turns)
        for name, its in times.items():
            speed = measure.compare(times[PLAIN], its)
            print(f"{name:21} {clock} {its.median_ms:8.1f} ms, {speed}", flush=True)
            figures[name][f"{clock}_times"] = its.to_dict()
    return harness.document(
        workload={"sizes": sizes, "batch": examples, "policy": policy, "logits_mib": 4 * tokens * classes / MIB},
        devices=[device.name for device in tf.config.list_logical_devices()],
        figures=figures,
    )


def main():
    """Measures, prints and writes."""
    parser = harness.parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="little time, to see that it runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # Before devices start: XLA reads its flags once.
        options = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*inference_step.*"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {options}"
        document = measured(folder, arguments.tiny)
    document["environment"]["variables"].pop("XLA_FLAGS", None)
    harness.write(arguments.results, document)


if __name__ == "__main__":
    main()

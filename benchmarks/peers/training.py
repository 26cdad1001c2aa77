"""Times PyTorch training steps: eager and compiled, on a batch that lies on the device and fed from pinned memory.

For the scripts beside it. Each variant prints one line of JSON: milliseconds a step (raw samples, each a block of steps
with one wait at its end), the first step apart, peak memory, versions and device.
"""

import argparse
import contextlib
import gc
import itertools
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

try:
    import torch
except ImportError as error:
    print(f"Skipped: expected torch. Found: {error}. Run: pip install -r benchmarks/peers/requirements.txt")
    sys.exit(3)

BATCHES = 8  # different ones, fed in turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained.

    Attributes:
        name: As tfopt-bench names it.
        batch_size: Examples a step.
        model: Makes the module, which takes inputs and targets and returns the loss.
        batch: Makes a batch in host memory, (inputs, targets), from its number.
        optimizer: Makes the optimizer from the module's parameters.
        autocast: Whether products are computed in bfloat16; else in float32, where CUDA may use TF32.
        steps: Steps in a sample.
        samples: Samples.
    """

    name: str
    batch_size: int
    model: Callable[[], torch.nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    optimizer: Callable
    autocast: bool = True
    steps: int = 20
    samples: int = 10


def arguments(description: str) -> argparse.Namespace:
    """The command line of a peer: --device, --tiny and --variants."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a model and steps so few that a CPU does them at once")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, metavar="NAME", help="only these")
    return parser.parse_args()


def run(workload: Workload, options: argparse.Namespace) -> None:
    """Measures the chosen variants and prints a line for each."""
    torch.set_float32_matmul_precision("high")
    device = options.device
    for variant in options.variants:
        compiled, feeding = VARIANTS[variant]
        measured = measure(workload, device, compiled, feeding)
        print(json.dumps(measured | environment(device)), flush=True)
        # What one variant compiled and allocated is not the next one's.
        torch._dynamo.reset()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def measure(workload: Workload, device: str, compiled: bool, feeding: Callable) -> dict:
    """Trains and times one variant."""
    torch.manual_seed(0)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = workload.model().to(device)
    step = training_step(workload, model, device, compiled)
    batches = feeding([workload.batch(number) for number in range(BATCHES)], device)
    first = seconds(step, batches, 1, device)
    warm = seconds(step, batches, workload.steps, device)
    samples = [seconds(step, batches, workload.steps, device) for _ in range(workload.samples)]
    return {
        "workload": workload.name,
        "variant": f"{'compiled' if compiled else 'eager'}, {feeding.__name__}",
        "batch_size": workload.batch_size,
        "dtype": "bfloat16 autocast" if workload.autocast else "float32",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "first_step_seconds": first,
        "warmup_seconds": warm,
        "steps_per_sample": workload.steps,
        "samples_ms": [1000 * sample / workload.steps for sample in samples],
        "peak_memory_mib": torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None,
        "loss": step(*next(batches)).item(),
    }


def training_step(workload: Workload, model: torch.nn.Module, device: str, compiled: bool) -> Callable:
    """One step: loss, gradients, update; waits for nothing."""
    optimizer = workload.optimizer(model.parameters())
    loss_of = torch.compile(model) if compiled else model

    def step(inputs, targets):
        # As PyTorch's users train: float32 weights, bfloat16 products. What a normalization returns, and what is added
        # to it, is float32 here, and bfloat16 under Keras' mixed_bfloat16.
        with torch.autocast(device, torch.bfloat16) if workload.autocast else contextlib.nullcontext():
            loss = loss_of(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def seconds(step: Callable, batches: Iterator, steps: int, device: str) -> float:
    """How long a block of steps takes, with one wait at its end."""
    start = time.perf_counter()
    for _ in range(steps):
        step(*next(batches))
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def resident(batches: list, device: str) -> Iterator:
    """One batch that lies on the device, again and again."""
    return itertools.repeat([tensor.to(device) for tensor in batches[0]])


def pinned(batches: list, device: str) -> Iterator:
    """Batches from pinned host memory, copied one ahead on a stream of their own."""
    if device == "cpu":
        yield from itertools.cycle(batches)
    batches = [[tensor.pin_memory() for tensor in batch] for batch in batches]
    side = torch.cuda.Stream()

    def copied(batch):
        with torch.cuda.stream(side):
            return [tensor.to(device, non_blocking=True) for tensor in batch]

    ahead = copied(batches[-1])
    for batch in itertools.cycle(batches):
        compute = torch.cuda.current_stream()
        compute.wait_stream(side)
        current, ahead = ahead, copied(batch)
        for tensor in current:
            tensor.record_stream(compute)  # or its memory is given out again while the step still reads it
        yield current


VARIANTS = {
    f"{'compiled' if compiled else 'eager'}, {feeding.__name__}": (compiled, feeding)
    for compiled, feeding in itertools.product((False, True), (resident, pinned))
}


def environment(device: str) -> dict:
    """What the figures were measured with."""
    cuda = device == "cuda"
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
    }

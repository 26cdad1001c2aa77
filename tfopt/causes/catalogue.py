"""The causes of a poorly used GPU: a name, a threshold and a remedy each, for alerts, reports and diagnoses alike."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that keeps a GPU from being used well."""

    name: str
    remedy: str
    """What to do, in sentences."""


# Removing a wait of 20 % makes a training up to 25 % faster, which is worth interrupting somebody.
WAITING_PERCENT = 20.0
# A diagnosis is asked for, so it names less: a cause of this share of a step, if its interval lies above 0.
WORTH_SHARE = 0.03

INPUT = Cause(
    "input",
    "tfopt.pipelines.profile_pipeline(dataset) names the slow stage; build_pipeline decodes in parallel, caches and "
    "prefetches.",
)
NO_PREFETCH = Cause("no prefetch", "Prefetch batches: make dataset.prefetch(2) the last stage.")
COPYING = Cause(
    "copying to the GPU",
    "Copy batches ahead (tfopt.fit.overlap(model) does, or build_pipeline), and send smaller dtypes: images as uint8.",
)

WAITS = Cause(
    "fit waits for each step",
    "Launch steps without waiting: tfopt.fit.overlap(model).",
)
LAUNCHED_ALONE = Cause(
    "steps launched one by one",
    "Launch several steps at once: tfopt.fit.overlap(model, steps_per_launch=8).",
)
SMALL_BATCH = Cause(
    "small batch", "Use a larger batch; tfopt.batch.find(model, dataset) measures which one fits and pays."
)
XLA_OFF = Cause(
    "XLA is off",
    "Let XLA fuse kernels: tfopt.xla.set_jit(model, True); tfopt.xla.decide(model, dataset) measures whether it pays.",
)
SHORT_KERNELS = Cause(
    "many short kernels", " ".join(cause.remedy for cause in (SMALL_BATCH, XLA_OFF, WAITS, LAUNCHED_ALONE))
)
BUSY_PERCENT = 100 - WAITING_PERCENT
# DCGM's documentation (profiling metrics): SM activity below 0.5 "likely indicates ineffective GPU usage".
SM_ACTIVE_PERCENT = 50.0
EAGER = Cause("eager execution", "Compile the model without run_eagerly=True.")
XLA_ON = Cause(
    "XLA does not pay",
    "Switch XLA off: tfopt.xla.set_jit(model, False).",
)

FLOAT32 = Cause(
    "float32",
    "tfopt.precision.check(model, dataset) checks whether it trains as well in 16 bits; "
    'tfopt.precision.apply(model, "auto") switches to them.',
)
# Too little for any matrix product that matters, but above the noise of an idle counter.
TENSOR_ACTIVE_PERCENT = 1.0
SIXTEEN_BITS = Cause(
    "16 bits do not pay",
    'Train in float32: tfopt.precision.apply(model, "float32").',
)
SIZES = Cause(
    "sizes that miss Tensor Cores",
    "Pad it to that size; tfopt.precision.alignment(model, batch_size=…) lists all of them.",
)
FLOAT32_PRODUCT = Cause(
    "float32 products in a 16-bit model",
    "Let the layer multiply in bfloat16 and cast its outputs: layers.Dense(classes), then "
    'layers.Activation("linear", dtype="float32"). For tied embeddings: ReversibleEmbedding(…, '
    'reverse_dtype="bfloat16"), or set that attribute before the first fit.',
)
ATTENTION = Cause(
    "attention without a fast kernel",
    "tfopt.kernels.use_flash_attention(model) runs it through one.",
)
BATCH_NORM = Cause(
    "batch norm without a fast kernel",
    "tfopt.kernels.fuse_batch_norm(model) runs it through one.",
)

CALLBACK = Cause("callback", "Do its work less often, or in a thread.")
PROGRESS_BAR = Cause(
    "progress bar",
    "One line per epoch is enough: model.fit(..., verbose=2).",
)
VALIDATION = Cause("validation", "Validate on fewer batches (validation_steps), or less often (validation_freq).")
BETWEEN_EPOCHS = Cause(
    "between epochs",
    "Check what callbacks do there, such as writing checkpoints, and do it less often.",
)
EPOCH_STARTS = Cause(
    "epoch starts",
    "Cache what is computed before a shuffle, whose buffer is filled again in each epoch, or choose longer epochs.",
)
NEW_SHAPES = Cause(
    "new shapes",
    "Give batches one shape, or a few: drop_remainder=True, padded_batch, bucket_by_sequence_length.",
)

COMMUNICATION = Cause(
    "communication",
    "Send fewer bytes (tfopt.distribute.compress_gradients(model)), or synchronise less often "
    "(gradient_accumulation_steps, under tfopt.distribute.strategy()). Both change the training.",
)

OTHER_PROCESS = Cause(
    "another process is on the GPU", "nvidia-smi names it; choose a free GPU with CUDA_VISIBLE_DEVICES."
)
CPUS_SHARED = Cause(
    "other processes use the CPUs",
    "top names them; end them, or give this training CPUs of its own (taskset, or the scheduler's cores per task).",
)
CPU_QUOTA = Cause(
    "the CPU quota is used up",
    "Ask the scheduler or the container for more CPUs (--cpus-per-task, docker run --cpus, resources.limits.cpu).",
)
FAR_CPUS = Cause(
    "CPUs far from the GPU",
    "Run on those near it: taskset -c {near} python …, or let the scheduler bind them (srun --gpu-bind=closest).",
)
PCIE_LINK = Cause(
    "a PCIe link below its best",
    "Reseat the card, or use another slot. Under load, nvidia-smi --format=csv --query-gpu=pcie.link.gen.current,"
    "pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max should show the best.",
)
MIG_INSTANCE = Cause(
    "a MIG instance", "nvidia-smi mig -lgi lists the instances; ask for a larger one if this one is always busy."
)
FULL_MEMORY = Cause(
    "the GPU's memory is nearly full",
    "tfopt.memory.estimate(model, batch) says what takes it, and tfopt.memory.recompute(model) lets it take less. Or "
    f"take a smaller batch, or 16 bits: {FLOAT32.remedy}",
)
FULL_SHARE = 0.95
THROTTLED_PERCENT = WAITING_PERCENT
# By the value of SLOWED_BY.
THROTTLED = {
    "power": Cause(
        "power", "Its power limit sets the pace: nvidia-smi -q -d POWER shows it, and nvidia-smi -pl raises it."
    ),
    "heat": Cause("heat", "Check its cooling: nvidia-smi -q -d TEMPERATURE shows the limits."),
    "heat or power": Cause(
        "heat or power", "Check its cooling and power supply: nvidia-smi -q -d PERFORMANCE shows which it is."
    ),
}

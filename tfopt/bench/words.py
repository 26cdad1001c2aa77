"""The figures of a results document in words, for the table and the page alike."""

from collections.abc import Sequence
from typing import Any

from tfopt.measure import StepTimes, compare


def number(value: float) -> str:
    """Two decimals from 0.1 to 10, else about three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def ratio(value: float, interval: Sequence[float]) -> str:
    """A ratio with its interval."""
    return f"{number(value)}× [{number(interval[0])}–{number(interval[1])}]"


def name(variant: dict[str, Any]) -> str:
    """The variant's name, with a star where tfopt recommends it for the device, and a mark where it was throttled."""
    return f"{variant['name']}{' *' * bool(variant.get('recommended'))}{' !' * bool(_throttled(variant))}"


def memory(variant: dict[str, Any]) -> str:
    """MiB of GPU memory at the peak."""
    peak = variant.get("peak_memory_mib")
    return "" if peak is None else f"{peak:,.0f}"


def of_ceiling(variant: dict[str, Any]) -> str:
    """The share of the ceiling's speed."""
    share = variant.get("of_ceiling")
    return number(share["ratio"]) if share else ""


def mfu(variant: dict[str, Any]) -> str:
    """Percent of the operations that a matrix product does in the same time."""
    percent = variant.get("mfu_percent")
    return "" if percent is None else number(percent)


def joules(variant: dict[str, Any]) -> str:
    """Energy for a thousand examples."""
    value = variant.get("joules_per_thousand_examples")
    return "" if value is None else number(value)


def conditions(variant: dict[str, Any]) -> str:
    """Clock, temperature and power of the GPU, as far as they are known."""
    found = variant.get("conditions") or {}
    clock, celsius, watts = (found.get(key) for key in ("sm_clock_mhz", "gpu_temperature_celsius", "gpu_power_watts"))
    parts = (
        clock and f"{clock[1]:g} MHz (lowest {clock[0]:g})",
        celsius and f"{celsius:g} °C",
        watts and f"{watts:.0f} W",
    )
    return ", ".join(filter(None, parts))


def has_memory(variants: Sequence[dict[str, Any]]) -> bool:
    """Whether any of them says how much GPU memory it needed: a CPU does not, nor did older runs."""
    return any(variant.get("peak_memory_mib") is not None for variant in variants)


def recommended(case: dict[str, Any]) -> str:
    """How the recommended variant did among those that compute the same, in a sentence; empty where there is none."""
    chosen = next((v for v in case["variants"] if v.get("recommended")), None)
    if chosen is None:
        return ""
    valid = [v for v in case["variants"] if v["verdict"] != "changes the result" and not v.get("ceiling")]
    times = {v["name"]: StepTimes.from_dict(v["step_time"]) for v in [chosen, *valid]}
    best = min(times, key=lambda name: times[name].median_ms)
    begin = f"{case['workload']}: {chosen['name']}, recommended for this device (*),"
    if best == chosen["name"]:
        return f"{begin} is the fastest."
    slower = compare(times[best], times[chosen["name"]]).verdict == "slower"
    return f"{begin} is slower than {best}." if slower else f"{begin} is as fast as {best}, the fastest, within noise."


def step_time(variant: dict[str, Any]) -> str:
    """Milliseconds a step, with the interval."""
    low, high = variant["step_time"]["interval_ms"]
    return f"{number(variant['step_time']['median_ms'])} [{number(low)}–{number(high)}]"


def speed(variant: dict[str, Any]) -> str:
    """The ratio to the baseline, with its interval."""
    comparison = variant["comparison"]
    return "1×" if comparison is None else ratio(comparison["ratio"], comparison["interval"])


def check(variant: dict[str, Any]) -> str:
    """What the comparison of results found."""
    return variant["check"]["text"] if variant["check"] else "not checked"


def verdict(variant: dict[str, Any]) -> str:
    """What to make of it."""
    stated: str = variant["verdict"]
    if stated == "faster" and variant.get("ceiling"):
        return "the ceiling"
    return "slower: leave it off" if stated == "slower" else stated


def reached(case: dict[str, Any]) -> str:
    """What share of the ceiling's speed each variant reaches, in a sentence; empty where there is no ceiling."""
    shares = [(v["name"], v["of_ceiling"]["ratio"]) for v in case["variants"] if v.get("of_ceiling")]
    listed = ", ".join(f"{name} {number(share)}" for name, share in shares)
    several = sum(v["ceiling"] for v in case["variants"] if "ceiling" in v) > 1
    what = f"of the speed of {case['limit']}, the lower ceiling" if several else "of the ceiling's speed"
    return f"{case['workload']}, {what}: {listed}." if shares else ""


def efficiency(case: dict[str, Any]) -> str:
    """What share of a matrix product's rate each variant reaches, and its energy; empty where neither is known."""
    rates = case.get("ceilings")
    tflops = rates["matmul_tflops"] if rates else {}
    product = ", ".join(f"{number(rate)} TFLOP/s in {dtype}" for dtype, rate in tflops.items())
    shares = [f"{v['name']} {number(v['mfu_percent'])} %" for v in case["variants"] if v.get("mfu_percent") is not None]
    used = f"{case['workload']}, of a matrix product's rate ({product}): {', '.join(shares)}." if shares else ""
    joules = [(v["name"], v.get("joules_per_thousand_examples")) for v in case["variants"]]
    spent = ", ".join(f"{name} {number(value)}" for name, value in joules if value is not None)
    return " ".join(filter(None, (used, f"Joules per 1,000 examples: {spent}." if spent else "")))


def throttled(case: dict[str, Any]) -> str:
    """Which variants ran while something held the GPU's clocks back, in a sentence; empty where none did."""
    held = [f"{v['name']} ({', '.join(_throttled(v))})" for v in case["variants"] if _throttled(v)]
    return f"{case['workload']}, throttled (!): {', '.join(held)}." if held else ""


def _throttled(variant: dict[str, Any]) -> list[str]:
    conditions = variant.get("conditions")  # older runs have none
    return conditions["throttle_reasons"] if conditions else []


def sentences(case: dict[str, Any]) -> list[str]:
    """What there is to say of a case beside its table."""
    found = (recommended(case), reached(case), efficiency(case), throttled(case), communication(case))
    return [sentence for sentence in found if sentence]


def communication(case: dict[str, Any]) -> str:
    """What the replicas send each other, how soon they train, and what is predicted; empty where there is one."""
    found = case.get("communication")
    if not found:
        return ""
    sent, expected = found["sent_bytes_per_step"], found["expected_bytes_per_step"]
    measured = "" if sent is None else f"{number(sent / 2**20)} MiB sent a step by each of {found['replicas']}, "
    first = f"{case['workload']}: {measured}{number(expected / 2**20)} MiB by the model's size."
    begun = ", ".join(f"{name} {number(value)} s" for name, value in found["start_to_first_step_seconds"].items())
    started = f" From the start to the end of the first step: {begun}." if begun else ""
    predicted = ", ".join(
        f"{each['replicas']} replicas {number(each['step_ms'])} ms a step ({each['efficiency']:.0%} of linear scaling)"
        for each in found["predictions"]
    )
    return f"{first}{started} Predicted, not measured: {predicted}."


def device(document: dict[str, Any]) -> str:
    """What it was measured on, in a line."""
    environment = document["environment"]
    host, packages = environment["host"], environment["packages"]
    names = [gpu["name"] for gpu in environment["gpus"]]
    gpus = f"{len(names)} × {names[0]}" if names else "no GPU"
    processor = f"{host['cpu_model'] or 'unknown CPU'} ({host['cpus']:g} CPUs)"
    return f"{processor}, {gpus}, TensorFlow {packages['tensorflow']}, Keras {packages['keras']}"


def lead(document: dict[str, Any]) -> str:
    """What the run found, in a sentence or two."""
    variants = [variant for case in document["cases"] for variant in case["variants"]]
    small = " Small sizes, as on a machine without a GPU: they say nothing about one." if document.get("small") else ""
    failed = [f"{case['suite']} on {case['workload']}" for case in document["cases"] if case["error"]]
    end = (f" Failed: {', '.join(failed)}." if failed else "") + small
    if not variants:
        return f"Nothing was measured.{end}"
    apart = [variant for case in document["cases"] if case["suite"] != "stack" for variant in case["variants"]]
    helped = [v for v in apart if v["verdict"] == "faster" and not v.get("ceiling")]
    best = sorted(helped, key=lambda v: -v["comparison"]["ratio"])
    listed = ", ".join(f"{v['name']} ({number(v['comparison']['ratio'])}×)" for v in best)
    first = f"Faster on this machine: {listed}." if best else "Nothing measured here was faster than its baseline."
    hurt = [v["name"] for v in apart if v["verdict"] == "slower"]
    second = f" Slower: {', '.join(hurt)}." if hurt else ""
    wrong = [v["name"] for v in variants if v["verdict"] == "changes the result"]
    return _stacked(document) + first + second + (f" Changes the result: {', '.join(wrong)}." if wrong else "") + end


def _stacked(document: dict[str, Any]) -> str:
    """What all techniques together bring, a sentence; empty where that was not measured."""
    cases = [case for case in document["cases"] if case["suite"] == "stack"]
    found = [(case["workload"], v) for case in cases for v in case["variants"] if v["recommended"]]
    listed = ", ".join(f"{workload} {number(v['comparison']['ratio'])}×" for workload, v in found)
    return f"From everything off to what is recommended: {listed}. " if listed else ""

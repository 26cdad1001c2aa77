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
    """The variant's name, with a star where tfopt recommends it for the device."""
    return f"{variant['name']} *" if variant.get("recommended") else str(variant["name"])


def memory(variant: dict[str, Any]) -> str:
    """MiB of GPU memory at the peak."""
    peak = variant.get("peak_memory_mib")
    return "" if peak is None else f"{peak:,.0f}"


def has_memory(variants: Sequence[dict[str, Any]]) -> bool:
    """Whether any of them says how much GPU memory it needed: a CPU does not, nor did older runs."""
    return any(variant.get("peak_memory_mib") is not None for variant in variants)


def recommended(case: dict[str, Any]) -> str:
    """How the recommended variant did among those that compute the same, in a sentence; empty where there is none."""
    chosen = next((v for v in case["variants"] if v.get("recommended")), None)
    if chosen is None:
        return ""
    valid = [v for v in case["variants"] if v["verdict"] != "changes the result"]
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
    return f"{case['workload']}, of the ceiling's speed: {listed}." if shares else ""


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
        f"on {each['replicas']} {number(each['step_ms'])} ms a step ({each['efficiency']:.0%} of linear scaling)"
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
    failed = [f"{case['suite']} on {case['workload']}" for case in document["cases"] if case["error"]]
    end = f" Failed: {', '.join(failed)}." if failed else ""
    if not variants:
        return f"Nothing was measured.{end}"
    helped = [v for v in variants if v["verdict"] == "faster" and not v.get("ceiling")]
    best = sorted(helped, key=lambda v: -v["comparison"]["ratio"])
    listed = ", ".join(f"{v['name']} ({number(v['comparison']['ratio'])}×)" for v in best)
    first = f"Faster on this machine: {listed}." if best else "Nothing measured here was faster than its baseline."
    hurt = [v["name"] for v in variants if v["verdict"] == "slower"]
    second = f" Slower: {', '.join(hurt)}." if hurt else ""
    wrong = [v["name"] for v in variants if v["verdict"] == "changes the result"]
    return first + second + (f" Changes the result: {', '.join(wrong)}." if wrong else "") + end

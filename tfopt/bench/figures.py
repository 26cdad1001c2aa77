"""The figures that follow from a case's samples and readings: speed, share of the ceiling, utilisation, energy."""

from collections.abc import Mapping
from typing import Any

from tfopt.measure import Comparison, StepTimes, compare


def figures(variant: Mapping[str, Any], case: Mapping[str, Any], times: Mapping[str, StepTimes]) -> dict[str, Any]:
    """What follows for one variant, as JSON.

    Args:
        variant: Its part of the results document, as far as it was measured and read.
        case: That of its case.
        times: By variant.
    """
    name = variant["name"]
    own, baseline, limit = times[name], case["baseline"], case["limit"]
    comparison = None if name == baseline else compare(times[baseline], own)
    return {
        "step_time": own.to_dict(),
        "comparison": comparison and comparison.to_dict(),
        "verdict": verdict(variant, comparison),
        "of_ceiling": None if limit is None or variant["ceiling"] else compare(times[limit], own).to_dict(),
        "mfu_percent": mfu_percent(variant, case, own),
        "joules_per_thousand_examples": joules_per_thousand_examples(variant, own),
    }


def verdict(variant: Mapping[str, Any], comparison: Comparison | None) -> str:
    """What to make of a variant; of the baseline there is no comparison."""
    if variant["check"] is not None and variant["check"]["passed"] is not True:
        return "changes the result"
    return "baseline" if comparison is None else comparison.verdict


def mfu_percent(variant: Mapping[str, Any], case: Mapping[str, Any], times: StepTimes) -> float | None:
    """Model FLOPs utilisation: the model's operations, of those that a large matrix product does in the same time.

    Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B, where the denominator
    is the listed peak.
    """
    operations, rates = case["operations_per_example"], case["ceilings"]
    if operations is None or rates is None or variant["dtype"] is None or times.examples_per_second is None:
        return None
    possible = rates["matmul_tflops"][variant["dtype"]] * 1e12
    return float(100 * operations * times.examples_per_second / possible)


def joules_per_thousand_examples(variant: Mapping[str, Any], times: StepTimes) -> float | None:
    """The energy that the GPUs take; None where they do not say, or the batch size is not known."""
    watts = variant["conditions"] and variant["conditions"]["gpu_power_watts"]
    if watts is None or times.examples_per_second is None:
        return None
    return float(watts * 1000 / times.examples_per_second)

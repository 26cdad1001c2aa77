"""Refuses random operations that a cache would freeze, TensorFlow would repeat, or a seed could not control."""

from collections.abc import Iterable

from tfopt.pipelines.inspection.tracing import Traced
from tfopt.pipelines.shared.elements import accepts_seed
from tfopt.pipelines.shared.nondeterminism import Finding
from tfopt.pipelines.shared.options import PipelineOptions, unmarked


def refuse_frozen(options: PipelineOptions, traced: Traced) -> None:
    """Refuses random operations before the cache, where each epoch would repeat the first one's draws.

    Also if cache="auto" would find no room right now: whether a model trains on fresh draws must not depend on free
    memory.

    Raises:
        ValueError: If there are random operations, and `cache` is not None.
    """
    if options.cache is None:
        return
    frozen = "the cache would freeze its result, and every epoch would be the same."
    for found in _only(traced.in_transform, "random", "assigning"):
        raise ValueError(
            f"Expected a deterministic `transform`. It holds {found}: {frozen} Move it to `augment`, which runs "
            "after the cache, or pass cache=None."
        )
    for found in _only(traced.in_source, "random", "assigning"):
        raise ValueError(
            f"Expected a deterministic source. It holds {found}: {frozen} Take it out and pass it as `augment`, or "
            "pass cache=None."
        )
    for found in _only(traced.in_source, "shuffle"):
        if options.training and not options.shuffle:
            raise ValueError(
                f"Expected a source that does not shuffle. It holds {found}: the cache would freeze its order. Pass "
                "shuffle=True instead, or cache=None."
            )


def refuse_unrepeatable(options: PipelineOptions, traced: Traced) -> None:
    """Refuses what a seed could not make the same on every run.

    Raises:
        ValueError: If `seed` is given, and the source, `transform` or `augment` draws random numbers not derived from
            it.
    """
    if options.seed is None:
        return
    broken = f"seed={options.seed} could not make it the same on every run."
    for found in _only(traced.in_source, "random", "assigning", "shuffle"):
        raise ValueError(
            f"Expected a deterministic source. It holds {found}: {broken} Take it out (`shuffle` and `augment` do it "
            "under the pipeline's seed), or pass seed=None."
        )
    for found in _only(traced.in_transform, "random", "assigning"):
        raise ValueError(
            f"Expected a deterministic `transform`. It holds {found}: {broken} Move it to an `augment` with a keyword "
            "`seed`, or pass seed=None."
        )
    draws = ("random", "assigning")
    for function, findings in zip(options.augmentations, traced.in_augment, strict=True):
        for found in _only(findings, *(draws if accepts_seed(unmarked(function)) else (*draws, "opaque"))):
            raise ValueError(
                f"Expected an `augment` that draws from its keyword `seed` alone. It holds {found}: {broken} Give it "
                "a keyword `seed` (int32, shape (2,)) and use stateless operations with it, such as "
                "tf.image.stateless_random_flip_left_right(image, seed), or pass seed=None."
            )


def refuse_restarting(stage: str, findings: Iterable[Finding]) -> None:
    """Refuses random operations with a fixed seed, whose draws TensorFlow repeats in every epoch.

    Args:
        stage: "augment" or "transform".
        findings: What was found in it.

    Raises:
        ValueError: If there are such operations.
    """
    for found in findings:
        if found.restarts:
            raise ValueError(
                f"Expected {stage!r} to draw new numbers in each epoch. It holds {found} with a fixed seed, from an "
                "argument or from tf.random.set_seed (which keras.utils.set_random_seed calls): in a dataset it "
                "repeats its draws in every epoch. Use an `augment` with a keyword `seed` (int32, shape (2,)) and "
                "stateless operations, such as tf.image.stateless_random_flip_left_right(image, seed)."
            )


def _only(findings: Iterable[Finding], *kinds: str) -> list[Finding]:
    return [finding for finding in findings if finding.kind in kinds]

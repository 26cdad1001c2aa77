"""Refuses randomness that the pipeline would freeze, or could not repeat under a seed."""

from collections.abc import Iterable

from tfopt.pipelines.options import PipelineOptions
from tfopt.pipelines.randomness import Finding


def refuse_frozen(options: PipelineOptions, source: list[Finding], transform: list[Finding]) -> None:
    """Refuses random operations before the cache: each epoch would get the first one's draws again.

    Also where cache="auto" would find no room now: whether a model trains on fresh draws must not hang on the memory
    that happens to be free.

    Args:
        options: The pipeline's options.
        source: What was found in the source's dataset and its `decode`.
        transform: What was found in `transform`.

    Raises:
        ValueError: There are random operations, and `cache` is not None.
    """
    if options.cache is None:
        return
    frozen = "the cache would freeze its result, and every epoch would be the same."
    for found in _only(transform, "random", "assigning"):
        raise ValueError(
            f"Expected a deterministic `transform`. It holds {found}: {frozen} Move it to `augment`, which runs "
            "behind the cache, or pass cache=None."
        )
    for found in _only(source, "random", "assigning"):
        raise ValueError(
            f"Expected a deterministic source. It holds {found}: {frozen} Take it out and pass it as `augment`, or "
            "pass cache=None."
        )
    for found in _only(source, "shuffle"):
        if options.training and not options.shuffle:
            raise ValueError(
                f"Expected a source that does not shuffle. It holds {found}: the cache would freeze its order. Pass "
                "shuffle=True in its place, or cache=None."
            )


def refuse_unrepeatable(
    options: PipelineOptions, source: list[Finding], transform: list[Finding], augment: list[Finding], takes_seed: bool
) -> None:
    """Refuses what a seed could not make the same on every run.

    Args:
        options: The pipeline's options.
        source: What was found in the source's dataset and its `decode`.
        transform: What was found in `transform`.
        augment: What was found in `augment`.
        takes_seed: Whether `augment` has a parameter `seed`.

    Raises:
        ValueError: `seed` is given, and the source, `transform` or `augment` draws random numbers not derived from it.
    """
    if options.seed is None:
        return
    broken = f"seed={options.seed} could not make it the same on every run."
    for found in _only(source, "random", "assigning", "shuffle"):
        raise ValueError(
            f"Expected a deterministic source. It holds {found}: {broken} Take it out (`shuffle` and `augment` do it "
            "under the pipeline's seed), or pass seed=None."
        )
    for found in _only(transform, "random", "assigning"):
        raise ValueError(
            f"Expected a deterministic `transform`. It holds {found}: {broken} Move it to an `augment` with a keyword "
            "`seed`, or pass seed=None."
        )
    kinds = ("random", "assigning") if takes_seed else ("random", "assigning", "opaque")
    for found in _only(augment, *kinds):
        raise ValueError(
            f"Expected an `augment` that draws from its keyword `seed` alone. It holds {found}: {broken} Give it a "
            "keyword `seed` (int32, shape (2,)) and use stateless operations with it, such as "
            "tf.image.stateless_random_flip_left_right(image, seed), or pass seed=None."
        )


def refuse_restarting(stage: str, findings: Iterable[Finding]) -> None:
    """Refuses random operations with a fixed seed: TensorFlow repeats their draws in every epoch.

    Args:
        stage: "augment" or "transform".
        findings: What was found in it.

    Raises:
        ValueError: There are such operations.
    """
    for found in findings:
        if found.restarts:
            raise ValueError(
                f"Expected {stage!r} to draw anew in each epoch. It holds {found} with a fixed seed, from an argument "
                "or from tf.random.set_seed (which keras.utils.set_random_seed calls): in a dataset it repeats its "
                "draws in every epoch. Use an `augment` with a keyword `seed` (int32, shape (2,)) and stateless "
                "operations, such as tf.image.stateless_random_flip_left_right(image, seed)."
            )


def _only(findings: Iterable[Finding], *kinds: str) -> list[Finding]:
    return [finding for finding in findings if finding.kind in kinds]

"""prune: a smaller model without the channels, units and heads it needs least."""

import keras

from tfopt.compress.pruning.graph import graph_of
from tfopt.compress.pruning.masking import apply, channel_masks
from tfopt.compress.pruning.report import Pruned
from tfopt.compress.pruning.selecting import Importance, checked_importance, checked_sparsity, choose, scorer
from tfopt.compress.versions.footprint import footprints
from tfopt.compress.versions.rebuilding import rebuilt, require_same
from tfopt.compress.versions.requirements import require_finite, require_single, trial_batch
from tfopt.errors import TfoptError
from tfopt.model.batches import Data


def prune(
    model: keras.Model,
    data: Data,
    sparsity: float = 0.5,
    *,
    importance: Importance = "taylor",
) -> Pruned:
    """Returns a smaller model, without the channels, units and attention heads that it needs least.

    Use it on a trained model, then train the smaller one: it is faster, and a few epochs regain most of the accuracy
    that it lost. For a large share, `PruningSchedule` prunes while the model trains.

    Each layer loses the same share of its channels; where more than 32 stay, their number is a multiple of 8. What
    depends on a channel goes with it, through batch norm, additions, concatenations, depthwise convolutions and changes
    of shape. The smaller model computes exactly what the old one does with zeros in all weights that read those
    channels. What cannot be cut, such as channels that a LayerNormalization averages over or that a Lambda reads,
    stays, and `.left` says why.

    `model` does not change. The smaller one has its layers' names and settings and is compiled alike, with a fresh
    optimizer. Patches of single layers, such as `tfopt.kernels.use_flash_attention` and `tfopt.memory.recompute`, are
    not carried over.

    Args:
        model: Built and compiled, Functional or Sequential.
        data: A tf.data.Dataset of batches (x, y[, sample_weight]), or one such batch. The first 32 batches show what is
            important; both models are timed on the first and evaluated on all of them.
        sparsity: The share to remove of each layer's channels and heads. Default: 0.5.
        importance: "taylor": how much the loss of a batch changes without a channel, to first order, squared and summed
            over batches, so that smaller batches say more; or "norm": the size of the weights that produce it. Default:
            "taylor".

    Returns:
        The new model, what was cut and what was left, and figures of both models.

    Raises:
        TypeError: If `model` is not a Keras model, or `data` is neither a dataset nor a batch.
        ValueError: If the model is not compiled or not built, the data do not fit it or never end, or an argument is
            out of range.
        tfopt.errors.PipelineError: If the dataset is empty.
        tfopt.errors.UnsupportedError: If the model has no graph, nothing of it can be cut, a part of it cannot be built
            again, or it trains on several replicas.
        tfopt.errors.TfoptError: If the gradients are not finite or all zero, or an output has no finite number.

    Example:
        >>> pruned = tfopt.compress.prune(model, validation, 0.5)
        >>> print(pruned)
        49.8 % of the channels and heads of 20 layers are cut. A training step is 2.1 times as fast (95 %: 2.05–2.16).
        …
        >>> pruned.model.fit(training, epochs=3)
    """
    require_single(model, "Prune")
    share, importance = checked_sparsity(sparsity), checked_importance(importance)
    require_finite(data)
    if model.optimizer is None:
        raise ValueError(
            f"Expected a model with an optimizer, since training steps are timed. Received: {model.name!r}, compiled "
            "with optimizer=None. Pass the one to train the smaller model with."
        )
    before = rebuilt(model)
    batch = trial_batch(before, data)
    require_same(model, before, batch, "a clone")
    graph = graph_of(before)
    scores = scorer(graph, before, data, importance)()
    if not scores.any():
        raise TfoptError(
            "Expected gradients, by which the importance of channels is measured. Found: all of them are zero. Train "
            "the model first, pass data with labels that count, or pass importance='norm'."
        )
    cut = choose(graph, scores, share)
    after = rebuilt(before, graph.configs(cut), graph.kept(cut))
    figures = footprints((before, after), data)
    apply(channel_masks(graph, cut))
    require_same(before, after, batch, "the smaller model")
    return Pruned(
        model=after,
        sparsity=share,
        kept=graph.channels(cut),
        left=graph.left,
        before=figures[0],
        after=figures[1],
    )

"""Assigns the nodes of a running pipeline to its stages.

TensorFlow's nodes carry operation names, and its optimiser fuses, adds and drops some, so they are aligned with the
datasets as they were written.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tfopt.pipelines.profiling.sampled_run import Node
from tfopt.pipelines.shared.options import function_name

# One node for two datasets, the later one first.
_FUSED = {"mapandbatch": ("batch", "map"), "shuffleandrepeat": ("repeat", "shuffle")}
# Datasets whose operation does not show.
_ANY = ("variant", "tfrecord")
# Operations that are stages of a plan even without a name.
_OWN_STAGES = ("shuffle", "cache", "batch", "prefetch")
_INJECTED = "prefetch"  # added by the optimiser

READ = "read"
_JOINT = "_and_"


class StageNames:
    """The stages of a pipeline, in the order in which elements pass them, and the nodes that do their work.

    For a plan, `sources` are the datasets that its source made. What they do is "read"; after them, operations without
    a name belong to the named stage that follows. Without `sources`, each operation is a stage.
    """

    def __init__(self, root: Node, dataset: Any, *, sources: Sequence[Any] | None = None):
        self._planned = sources is not None
        self._sources = {id(source) for source in sources or ()}
        self._named: dict[int, tuple[str, ...]] = {}  # the stages of a node, by its id()
        self.stages: list[str] = []
        self._by_dataset: dict[int, str] = {}
        self._visit(root, dataset, None)

    @property
    def any_fused(self) -> bool:
        """Whether any node does the work of several stages."""
        return any(len(stages) > 1 for stages in self._named.values())

    def of_dataset(self, dataset: Any) -> str | None:
        """Returns the stage of a dataset that is not a plan's; None if nothing is known of it."""
        return self._by_dataset.get(id(dataset))

    def of(self, node: Node) -> tuple[str, ...]:
        """Returns the stages of a node; several if it is fused."""
        return self._named.get(id(node), ())

    def _visit(self, top: Node, dataset: Any, consumer: str | None) -> None:
        """Names a node, all nodes on the way to its source, and those that join them."""
        nodes, datasets = _chain_of_nodes(top), chain_of_datasets(dataset)
        kinds = [(node, kind) for node in nodes for kind in _FUSED.get(kind_of(node.name), (kind_of(node.name),))]
        pairs = _align([kind for _, kind in kinds], [kind_of(type(one).__name__) for one in datasets])
        names = self._names(kinds, pairs, datasets, consumer)
        # From the source on, as elements pass.
        for (node, _), index, name in reversed(list(zip(kinds, pairs, names, strict=True))):
            joining = () if index is None else datasets[index]._inputs()[1:]
            for (slot, _), inner in node.inputs.items():
                if 0 < slot <= len(joining) and not node.nests:
                    self._visit(inner, joining[slot - 1], name)
            # A plan's map that does the work of several stages carries all their names.
            if name is not None:
                for part in name.split(_JOINT) if self._planned else [name]:
                    self._name(node, part)

    def _name(self, node: Node, name: str) -> None:
        if name not in self.stages:
            self.stages.append(name)
        held = self._named.get(id(node), ())
        self._named[id(node)] = held if name in held else (*held, name)
        for (slot, _), inner in node.inputs.items():
            if slot > 0:
                for nested in inner.walk():
                    self._named.setdefault(id(nested), (name,))

    def _names(
        self,
        kinds: Sequence[tuple[Node, str]],
        pairs: Sequence[int | None],
        datasets: Sequence[Any],
        consumer: str | None,
    ) -> list[str | None]:
        """Returns a stage for each node; None for the root, which does no work."""
        written = [None if index is None else datasets[index] for index in pairs]
        # If a dataset hides what was written, a node without a match may still be the user's.
        hidden = any(kind_of(type(one).__name__) in _ANY for one in written)
        own = [self._own_name(kind, one, hidden) for (_, kind), one in zip(kinds, written, strict=True)]
        source = next((index for index, one in enumerate(datasets) if id(one) in self._sources), len(datasets))
        ends_in_source = consumer is None
        names: list[str | None] = []
        for place, ((node, kind), index) in enumerate(zip(kinds, pairs, strict=True)):
            if node.name == "Root":
                names.append(None)
                continue
            of_source = (index is not None and index >= source) or (ends_in_source and not any(own[place:]))
            if self._planned and (of_source or consumer == READ):
                consumer = READ
            else:
                consumer = own[place] or consumer or next(filter(None, own[place:]), kind)
            names.append(consumer)
        return names

    def _own_name(self, kind: str, dataset: Any, hidden: bool) -> str | None:
        """Returns the stage that an operation is by itself; None if it belongs to its neighbour."""
        if dataset is None and kind == _INJECTED:
            return None
        if self._planned:
            return getattr(dataset, "_name", None) or (kind if kind in _OWN_STAGES else None)
        if dataset is None:
            return kind if hidden else None
        if id(dataset) not in self._by_dataset:
            self._by_dataset[id(dataset)] = self._unused(described_stage(kind, dataset))
        return self._by_dataset[id(dataset)]

    def _unused(self, name: str) -> str:
        candidates = itertools.chain([name], (f"{name} {number}" for number in itertools.count(2)))
        return next(candidate for candidate in candidates if candidate not in self._by_dataset.values())


def described_stage(kind: str, dataset: Any) -> str:
    """Returns what a stage is called: its name, or its kind and function."""
    if getattr(dataset, "_name", None):
        return str(dataset._name)
    function = getattr(getattr(dataset, "_map_func", None), "_func", None)
    if function is None:
        return kind
    name = function_name(function).rpartition("<locals>.")[2]
    return "generator" if kind == "flatmap" and "flat_map_fn" in name else f"{kind} ({name})"


def kind_of(name: str) -> str:
    """Returns the kind of a stage: the common part of an operation's name and that of its Python class."""
    name = re.sub(r"^_?(Parallel|Memory|File|Finite|Forever|Empty)?", "", name)
    return re.sub(r"(Impl|Dataset|V\d+)+$", "", name).lower()


def _chain_of_nodes(node: Node) -> list[Node]:
    chain = [node]
    while first := [inner for (slot, _), inner in chain[-1].inputs.items() if slot == 0]:
        # Several only if a cache was filled and then read: the one that did more is the pipeline's.
        chain.append(max(first, key=lambda inner: inner.seconds))
    return chain


def chain_of_datasets(dataset: Any) -> list[Any]:
    """Returns a dataset, and the first of those it reads from, down to the source."""
    chain = [dataset]
    while inputs := chain[-1]._inputs():
        chain.append(inputs[0])
    return chain


def _align(kinds: Sequence[str], written: Sequence[str]) -> list[int | None]:
    """Returns the index of each node's dataset; None for nodes that the optimiser added.

    This is the longest common subsequence; a dataset of unknown kind may match any node, but counts for less.
    """
    # From a node and a dataset on: the best score, and the pairs that reach it.
    best: dict[tuple[int, int], tuple[int, dict[int, int]]] = defaultdict(lambda: (0, {}))
    for i in reversed(range(len(kinds))):
        for j in reversed(range(len(written))):
            ways = [best[i, j + 1], best[i + 1, j]]
            if alike := _alike(kinds[i], written[j]):
                score, pairs = best[i + 1, j + 1]
                ways.insert(0, (score + alike, {i: j, **pairs}))
            best[i, j] = max(ways, key=lambda way: way[0])
    return [best[0, 0][1].get(i) for i in range(len(kinds))]


def _alike(kind: str, written: str) -> int:
    return 2 if kind == written else int(written in _ANY and kind != _INJECTED)

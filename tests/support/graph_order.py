"""Whether a training step, as TensorFlow runs it after Grappler, reads variables in an order to their assignments."""

from itertools import combinations

import tensorflow as tf

from tfopt.internals.sources import find

_READING = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp")
_PASSING = ("_Arg", "Identity", "Switch", "RefSwitch", "Enter")
_RESOURCE = tf.resource.as_datatype_enum


def unordered(model, batch):
    """Trains one step, and returns the pairs of operations on one variable that may run in either order.

    Pairs of which both only read do not count.
    """
    model.make_train_function(force=True)
    iterator = iter(tf.data.Dataset.from_tensors(batch))
    context, _ = find("tensorflow.python.eager.context:context")
    context.enable_run_metadata()
    try:
        model.train_function(iterator)
        graphs = [one.post_optimization_graph for one in context.export_run_metadata().function_graphs]
    finally:
        context.disable_run_metadata()
    return [pair for graph in graphs for pair in _unordered(graph.node)]


def _unordered(nodes):
    named = {node.name: node for node in nodes}
    users = {}
    for node in nodes:
        if node.op not in _PASSING:
            for name in {_resource(_producer(one), named) for one in node.input if one[0] != "^"} - {None}:
                users.setdefault(name, []).append(node)
    before = {}

    def ancestors(node):
        if node.name not in before:
            found, pending = set(), [node]
            while pending:
                new = {_producer(one) for one in pending.pop().input} & named.keys() - found
                found |= new
                pending += map(named.get, new)
            before[node.name] = found
        return before[node.name]

    return [
        (one.name, other.name)
        for using in users.values()
        for one, other in combinations(using, 2)
        if not (one.op in _READING and other.op in _READING)
        and one.name not in ancestors(other)
        and other.name not in ancestors(one)
    ]


def _producer(name):
    """The operation that an input comes from, as data or as a control edge."""
    return name.removeprefix("^").split(":")[0]


def _resource(name, named):
    """The variable that an operation hands on, if it does."""
    node = named.get(name)
    while node is not None and node.op in _PASSING and node.attr["T"].type == _RESOURCE:
        if node.op == "_Arg":
            return node.name
        node = named.get(_producer(node.input[0]))
    return node.name if node is not None and node.op == "VarHandleOp" else None

"""Joins the linear layers of a graph that read the same input into one call.

Queries, keys and values, or gate and up: a call costs some ten microseconds whatever it computes,
which for small models is as long as the computation. The same numbers, bit for bit.
"""

import operator

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files


class JoinLinears(CustomGraphPass):
    """A pass of the compiler over a graph."""

    def __call__(self, graph: fx.Graph) -> None:
        linear = torch.ops.outrider.linear.default
        same: dict[tuple[fx.Node, int], list[fx.Node]] = {}
        for node in graph.nodes:
            if node.op == "call_function" and node.target is linear:
                x, _, _, widest = node.args
                same.setdefault((x, widest), []).append(node)
        for (x, widest), nodes in same.items():
            if len(nodes) > 1:
                _join(graph, x, widest, nodes)

    def uuid(self) -> bytes:
        """What a kept graph depends on besides the model."""
        return get_hash_for_files((__file__,))


def _join(graph: fx.Graph, x: fx.Node, widest: int, nodes: list[fx.Node]) -> None:
    weights, biases = ([node.args[i] for node in nodes] for i in (1, 2))
    order = {node: place for place, node in enumerate(graph.nodes)}
    needed = [arg for arg in (*weights, *biases) if isinstance(arg, fx.Node)]
    if any(order[arg] > order[nodes[0]] for arg in needed):
        return
    with graph.inserting_before(nodes[0]):
        target = torch.ops.outrider.linears.default
        joined = graph.call_function(target, (x, weights, biases, widest))
        joined.meta["val"] = [node.meta["val"] for node in nodes]
        for i, node in enumerate(nodes):
            part = graph.call_function(operator.getitem, (joined, i))
            part.meta.update(node.meta)
            node.replace_all_uses_with(part)
    for node in nodes:
        graph.erase_node(node)

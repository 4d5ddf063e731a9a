"""What is changed in the graph of a program whose linear layers compute with our kernels, before it
is compiled. The results are the same, bit for bit.

- Linear layers with the same input are joined into one call, as the query, key and value
  projections, or gate and up. A call costs some ten microseconds whatever it computes, which for
  small models is as long as the computation.
- The cosines and sines of rotary embedding that several layers read are computed by our kernel,
  and so once. The compiler takes them for cheap, and computes them anew for each head of each
  layer.
"""

from typing import Any, cast

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

_READS_OF_A_LAYER = 2
"""A layer reads cosines and sines for its queries and for its keys."""


class KernelPasses(CustomGraphPass):
    """Joins the linear layers of a graph, and computes its angles once."""

    def __call__(self, graph: fx.Graph) -> None:
        join_linears(graph)
        compute_angles_once(graph)

    def uuid(self) -> bytes:
        """What a compiled program depends on besides the model: this file."""
        return get_hash_for_files((__file__,))


def join_linears(graph: fx.Graph) -> None:
    """Joins the linear layers that have the same input."""
    linear = torch.ops.outrider.linear.default
    same: dict[Any, list[Any]] = {}  # arguments of nodes are of many types
    for node in graph.nodes:
        if node.op == "call_function" and node.target is linear:
            x, weight, bias, _, widest = cast(Any, node.args)
            kind = (x, weight.meta["val"].ndim, bias is None, widest)
            same.setdefault(kind, []).append(node)
    for (x, _, _, widest), nodes in same.items():
        if len(nodes) > 1:
            _join(graph, x, widest, nodes)


def compute_angles_once(graph: fx.Graph) -> None:
    """Computes cosines and sines in float32 by our kernel, whose result is stored, where several
    layers read them. For one layer a call takes longer than computing them for each head."""
    ours = {
        torch.ops.aten.cos.default: torch.ops.outrider.cos.default,
        torch.ops.aten.sin.default: torch.ops.outrider.sin.default,
    }
    for node in graph.nodes:
        if node.target not in ours or node.meta["val"].dtype != torch.float32:
            continue
        if _num_reads(node) > _READS_OF_A_LAYER:
            node.target = ours[node.target]


def _num_reads(node: fx.Node) -> int:
    """How many nodes read a value, or what is computed from it alone."""
    while len(node.users) == 1:
        node = next(iter(node.users))
    return len(node.users)


def _join(graph: fx.Graph, x: fx.Node, widest: int, nodes: list[Any]) -> None:
    """Joins layers, all or none of which are packed, and all or none of which have biases."""
    weights, biases, outputs = ([node.args[i] for node in nodes] for i in (1, 2, 3))
    biases = [bias for bias in biases if bias is not None]
    order = {node: i for i, node in enumerate(graph.nodes)}
    if any(order[needed] > order[nodes[0]] for needed in (*weights, *biases)):
        return
    with graph.inserting_before(nodes[0]):
        target = torch.ops.outrider.linears.default
        joined = graph.call_function(target, (x, weights, biases, outputs, widest))
        value = nodes[0].meta["val"]
        joined.meta["val"] = value.new_empty((*value.shape[:-1], sum(outputs)))
        start = 0
        for node, width in zip(nodes, outputs, strict=True):
            arguments = (joined, -1, start, start + width)
            part = graph.call_function(torch.ops.aten.slice.Tensor, arguments)
            part.meta.update(node.meta)
            part.meta["val"] = joined.meta["val"][..., start : start + width]
            node.replace_all_uses_with(part)
            start += width
    for node in nodes:
        graph.erase_node(node)

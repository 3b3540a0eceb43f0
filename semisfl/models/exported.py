"""Describe any PyTorch module as a table of layers, with its weights.

`torch.export` lists the operations that a module runs on images. Each becomes a layer. Where two branches meet again,
the last operation that both depend on is where a residual block or a gate begins. The network that the table describes
is then run beside the module: other numbers are an error.
"""

import copy
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn

from semisfl.models import layers
from semisfl.models.modules import layers_of, modules_of
from semisfl.models.shapes import pair
from semisfl.settings.layer_kinds import Layer, parse_layers

TOLERANCE = 1e-5
"""Largest difference between the outputs of module and table, as a part of the largest output."""


@torch.no_grad()
def described(module: nn.Module, images: Tensor) -> tuple[tuple[Layer, ...], layers.Layers]:
    """Return a module as a table, and the network that the table describes, with the module's weights.

    The last linear layer of the table leaves its features out; it is added if the module has none. ``images``: at least
    one [n, channels, height, width]. Raises ValueError for an operation that no kind of layer describes, and if the
    network gives other outputs than the module.
    """
    module = copy.deepcopy(module).cpu().float().eval()
    graph = Graph(torch.export.export(module, (images,)))
    found, flow, head, compared = graph.found, graph.flow, graph.found[-1], None
    if flow == "pixel" and isinstance(head, nn.Conv2d):
        linear = nn.Linear(head.in_channels, head.out_channels, head.bias is not None)
        found = found[:-1].extend([nn.Flatten(), _with(linear, head._parameters)])  # type: ignore[operator]
    elif not isinstance(head, nn.Linear):
        compared, width = len(found), int(found.forward(images).shape[1])
        found.extend(
            [*[nn.AdaptiveAvgPool2d(1)] * (flow == "picture"), nn.Flatten(), nn.Linear(width, 2)]
        )
    rows = layers_of(found)
    classes = rows[-1].pop("features")
    table = parse_layers(rows)
    network = modules_of(table, tuple(images.shape[1:]), classes).eval()  # type: ignore[arg-type]
    network.load_state_dict(found.state_dict())
    for batch in (images, torch.randn(images.shape, generator=torch.Generator().manual_seed(0))):
        expected, got = (
            torch.utils._pytree.tree_leaves([module(batch)])[0],
            network[:compared](batch),
        )
        apart, largest = (got.reshape(expected.shape) - expected).abs().max(), expected.abs().max()
        if not apart <= TOLERANCE * largest:
            raise ValueError(
                f"the table gives other outputs than the module: they differ by up to {apart:.3g}, the largest is "
                f"{largest:.3g}, the limit {TOLERANCE:g} of it; the module computes something that was not seen"
            )
    return table, network


# --- the graph: each operation's layer, and after which other operation it begins --------------------------

TURNS = {("picture", (0, 2, 3, 1)): "channels last", ("channels last", (0, 3, 1, 2)): "picture"}
"""How values lie after a permutation of their axes.

Values of an image lie as a "picture" [channels, height, width], as "channels last", "flat" [length], or as "pixel": flat
features that are the channels of one pixel, which a table keeps as a picture.
"""


class Graph:
    """The operations of an exported module as layers: ``found``, of its first output, which lies as ``flow`` says."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        """Read the operations in the order in which they run; raise ValueError for one that no layer describes."""
        names = {one.arg.name: one.target for one in program.graph_signature.input_specs}
        self._constants: dict[fx.Node, Any] = {
            node: {**program.state_dict, **program.constants}[names[node.name]]
            for node in program.graph.nodes
            if names.get(node.name) is not None
        }
        self._layers: dict[fx.Node, tuple[str, nn.Module]] = {}
        self._before: dict[fx.Node, fx.Node] = {}
        """The last operation that every way from the images to this one passes."""
        self._flows: dict[fx.Node, str] = {}
        for node in program.graph.nodes:
            if node.op == "call_function" and node.users:
                self._read(node)
            elif node.op == "placeholder" and node not in self._constants:
                self._flows[node] = "picture"
        images, (last, *_) = next(iter(self._flows)), program.graph.output_node().all_input_nodes
        self.found, self.flow = self._between(images, last), self._flows[last]

    def _read(self, node: fx.Node) -> None:
        """Compute a constant, or find the layer of an operation on values of the images."""
        inputs = [one for one in node.all_input_nodes if one not in self._constants]
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda one: self._constants.get(one, one)
        )
        if not inputs:
            self._constants[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            return
        place = list(node.meta.get("nn_module_stack", {"": ("", None)}).values())[-1][0]
        kind = str(node.target).removeprefix("aten.").partition(".")[0].rstrip("_")
        schema = getattr(node.target, "_schema", torch.ops.aten.relu.default._schema)
        given = {
            **{one.name: one.default_value for one in schema.arguments},
            **dict(zip((one.name for one in schema.arguments), args, strict=False)),
            **kwargs,
        }
        operation = SimpleNamespace(
            **{key: tuple(one) if isinstance(one, list) else one for key, one in given.items()},
            takes=tuple(inputs[0].meta["val"].shape),
            gives=tuple(node.meta["val"].shape),
            flow=self._flows[inputs[0]],
        )
        if kind in JOINS and len(inputs) == 2:
            self._before[node], layer = self._join(JOINS[kind], operation, *inputs)
        else:
            known = OPERATIONS.get(kind, lambda operation: False)
            self._before[node], layer = inputs[0], known(operation)
        if not isinstance(layer, nn.Module):
            raise ValueError(
                f"no layer describes the operation {kind} of {place or 'the module itself'}, from "
                f"{list(operation.takes[1:])} to {list(operation.gives[1:])} with {node.args[1:]} {dict(node.kwargs)}; "
                "replace it, or give the part of the network before it"
            )
        self._layers[node], self._flows[node] = (
            (re.sub(r"\W", "_", "_".join(place.split(".")[-4:]))[-34:] or kind, layer),
            _flow_after(kind, layer, operation),
        )

    def _join(
        self, kind: Callable[..., nn.Module], operation: SimpleNamespace, *ends: fx.Node
    ) -> tuple[fx.Node, nn.Module | bool]:
        """Return where two branches begin, and the block that adds or multiplies them; False if there is no such block."""
        start = next(one for one in self._chain(ends[1]) if one in self._chain(ends[0]))
        branches = sorted((self._between(start, one) for one in ends), key=len, reverse=True)
        lie_alike = self._flows[ends[1]] == operation.flow and getattr(operation, "alpha", 1) == 1
        if not lie_alike or (kind is layers.Gate and len(branches[1])):
            return start, False
        return start, kind(*(one for one in branches if len(one)))

    def _chain(self, node: fx.Node) -> list[fx.Node]:
        """Return the operations that every way from the images to ``node`` passes, the last first."""
        return [node, *(self._chain(self._before[node]) if node in self._before else [])]

    def _between(self, start: fx.Node, end: fx.Node) -> layers.Layers:
        """Return the layers from the result of ``start`` to that of ``end``; margins go to the convolution after them."""
        nodes, chain = self._chain(end), [("", nn.Module())]
        for name, layer in (self._layers[one] for one in nodes[: nodes.index(start)][::-1]):
            if isinstance(layer, layers.PaddedConv) and isinstance(chain[-1][1], nn.ZeroPad2d):
                layer.margins = tuple(map(sum, zip(layer.margins, chain.pop()[1].padding)))  # type: ignore  # noqa: B905
            chain += [(name, layer)] if not isinstance(layer, nn.Identity) else []
        named = ((f"{name}_{index}", layer) for index, (name, layer) in enumerate(chain[1:]))
        return layers.Layers(OrderedDict(named))


def _flow_after(kind: str, layer: nn.Module, operation: SimpleNamespace) -> str:
    """Return how values lie after an operation."""
    if kind == "permute":
        return TURNS[operation.flow, operation.dims]
    if len(operation.gives) < 4:
        return "flat" if operation.flow == "flat" or isinstance(layer, nn.Flatten) else "pixel"
    return "picture" if operation.flow == "pixel" else str(operation.flow)


def _with(layer: nn.Module, given: Mapping[str, Any]) -> nn.Module:
    """Return a layer with those of its weights and statistics that are given."""
    for name, own in (*layer.named_parameters(), *layer.named_buffers()):
        if given.get(name) is not None:
            own.data = given[name].detach().clone().reshape(own.shape)
    return layer


def _conv(op: SimpleNamespace) -> nn.Module | bool:
    """Return a convolution; its margins are left, right, above and below."""
    kernel = tuple(op.weight.shape[2:])
    named: dict[Any, Any] = {"valid": 0, "same": tuple(side // 2 for side in kernel)}
    high, wide = pair(named.get(op.padding, op.padding))
    conv = layers.PaddedConv(
        op.takes[1],
        len(op.weight),
        kernel,
        op.stride,
        groups=op.groups,
        bias=op.bias is not None,
        margins=(wide, wide, high, high),
    )
    return pair(op.dilation) == (1, 1) and _with(conv, vars(op))


def _linear(op: SimpleNamespace) -> nn.Module | bool:
    """Return a linear layer, or over the channels of a picture a convolution of one pixel."""
    if op.flow == "flat":
        return _with(nn.Linear(*op.weight.T.shape, bias=op.bias is not None), vars(op))  # type: ignore[misc]
    conv = layers.PaddedConv(*op.weight.T.shape, 1, margins=(0,) * 4, bias=op.bias is not None)
    return op.flow != "picture" and _with(conv, vars(op))


def _scale(op: SimpleNamespace) -> nn.Module | bool:
    """Return a product with a constant, or with one per channel."""
    factor = torch.as_tensor(op.other if isinstance(op.self, fx.Node) else op.self).float()
    full = factor.expand(op.gives)[0].movedim(-1 if op.flow == "channels last" else 0, 0)
    # Factors that differ between pixels show in the outputs.
    return op.gives == op.takes and _with(
        layers.Scale(len(full), 1.0), {"weight": full.reshape(len(full), -1)[:, 0]}
    )


def _reshape(op: SimpleNamespace) -> nn.Module | bool:
    """Return a flatten, or nothing where the values are those of one pixel before and after."""
    flat = (op.takes[0], torch.Size(op.takes[1:]).numel())
    if op.flow == "picture" and op.gives == flat and flat[1] > op.takes[1]:
        return nn.Flatten()
    return op.gives[:2] == op.takes[:2] and nn.Identity()


JOINS: dict[str, Callable[..., nn.Module]] = {"add": layers.Residual, "mul": layers.Gate}
OPERATIONS: dict[str, Callable[[SimpleNamespace], nn.Module | bool]] = {
    "mul": _scale,
    "conv2d": _conv,
    "linear": _linear,
    "batch_norm": lambda op: (
        not op.training
        and _with(
            (nn.BatchNorm1d if op.flow == "flat" else nn.BatchNorm2d)(
                op.takes[1], op.eps, op.momentum or 0.1
            ),
            vars(op),
        )
    ),
    "layer_norm": lambda op: _with(
        (layers.PositionNorm if op.flow in ("pixel", "channels last") else nn.LayerNorm)(
            op.normalized_shape, op.eps
        ),
        vars(op),
    ),
    "group_norm": lambda op: _with(nn.GroupNorm(op.num_groups, op.takes[1], op.eps), vars(op)),
    "max_pool2d": lambda op: nn.MaxPool2d(
        op.kernel_size, op.stride or None, op.padding, op.dilation, False, op.ceil_mode
    ),
    "avg_pool2d": lambda op: nn.AvgPool2d(
        op.kernel_size, op.stride or None, op.padding, op.ceil_mode, True, op.divisor_override
    ),
    "adaptive_avg_pool2d": lambda op: (
        (op.gives[2:] == (1, 1) and nn.AdaptiveAvgPool2d(1))
        or (
            not any(a % b for a, b in zip(op.takes, op.gives, strict=True))
            and nn.AvgPool2d((op.takes[2] // op.gives[2], op.takes[3] // op.gives[3]))
        )
    ),
    "mean": lambda op: (
        sorted(axis % 4 for axis in op.dim or ())
        == {"picture": [2, 3], "channels last": [1, 2]}.get(op.flow)
        and nn.AdaptiveAvgPool2d(1)
    ),
    "permute": lambda op: (op.flow, op.dims) in TURNS and nn.Identity(),
    **dict.fromkeys(
        ("flatten", "view", "reshape", "squeeze", "unsqueeze", "expand", "expand_as"), _reshape
    ),
    "relu": lambda op: nn.ReLU(),
    "relu6": lambda op: nn.ReLU6(),
    "hardtanh": lambda op: (op.min_val, op.max_val) == (0, 6) and nn.ReLU6(),
    "clamp": lambda op: {(0, 6): nn.ReLU6(), (0, None): nn.ReLU()}.get((op.min, op.max), False),
    "clamp_min": lambda op: op.min == 0 and nn.ReLU(),
    "silu": lambda op: nn.SiLU(),
    "gelu": lambda op: op.approximate == "none" and nn.GELU(),
    "sigmoid": lambda op: nn.Sigmoid(),
    "hardswish": lambda op: nn.Hardswish(),
    "hardsigmoid": lambda op: nn.Hardsigmoid(),
    "pad": lambda op: (
        op.flow == "picture"
        and op.mode == "constant"
        and not op.value
        and nn.ZeroPad2d((*op.pad, 0, 0)[:4])
    ),
    # These pass values on; dropout does in eval mode.
    **dict.fromkeys(
        ("dropout", "feature_dropout", "alias", "clone", "contiguous", "detach", "to"),
        lambda op: nn.Identity(),
    ),
}
"""The layer of an operation on one value, or False. Writing the table checks further settings; an ``nn.Identity`` is
left out."""

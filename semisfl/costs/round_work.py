"""How much a round computes, and how fast the machine multiplies matrices: what timings are held against."""

import time
from statistics import median

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from semisfl.methods.sizes import Cost, Sizes
from semisfl.models.split import build_model
from semisfl.settings import lookup
from semisfl.settings.catalog import METHODS
from semisfl.settings.config import Config

# Large enough that a GPU reaches what it can, small enough for a CPU to take a moment.
SIDE_CUDA, SIDE_CPU, TIMES = 8192, 1024, 10


def operations(module: nn.Module, shape: tuple[int, ...]) -> int:
    """Floating-point operations of one input's forward pass."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        module.eval()(torch.zeros(1, *shape, device=next(module.parameters()).device))
    return counter.get_total_flops()


def round_operations(
    options: Config, shape: tuple[int, int, int], classes: int, images: int
) -> float:
    """Of a round of any method whose row says what it computes; a backward pass counts as two.

    ``images`` are all clients' together, of which some methods look at every active client's.
    """
    row = METHODS[options.method]
    assert row.cost is not None, f"{options.method} does not say what its rounds compute"
    kind = lookup.settings_class(row)
    # One byte of everything, so that what a method sends tells how its clients take part.
    cost: Cost = lookup.load(row.cost)(Sizes(1, 1, 1, 1, 1, 1), kind and options.settings(kind))
    model, work = build_model(options, shape, classes), cost.work
    bottom = operations(model.bottom, shape)
    top, head = (operations(part, (model.features,)) for part in (model.top, model.projector))
    server, clients = options.server, options.clients
    # A teacher that only gives keys uses its bottom and head.
    supervised = work.supervised * bottom + 3 * top + work.supervised * head * work.head
    total = server.steps * server.batch * supervised
    rows = clients.steps * clients.active * clients.batch
    if cost.features:
        total += rows * (work.client * bottom + work.server * (top + head * work.head))
    elif cost.total:
        seen = images * clients.active / clients.total
        total += (rows * work.client + seen * work.look) * (bottom + top)
    return total


def matrix_product(device: torch.device) -> float:
    """TFLOP/s of a large product in the type that is trained in: bf16 on a GPU, fp32 on a CPU."""
    cuda = device.type == "cuda"
    side, dtype = (SIDE_CUDA, torch.bfloat16) if cuda else (SIDE_CPU, torch.float32)
    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(3 + TIMES):
        started = time.perf_counter()
        torch.mm(one, other)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return 2 * side**3 / median(seconds[3:]) / 1e12

"""The precision that models compute in."""

import sys

from tests import processes

CHANGED_INSIDE = """
import torch
from semisfl.engine.hardware import Hardware
from semisfl.settings.run import RuntimeConfig

layer, one = torch.nn.Linear(1, 1, bias=False), torch.ones(1, 1)
with Hardware("cpu", RuntimeConfig(precision="bf16")).arithmetic():
    before = layer(one)
    with torch.no_grad():
        layer.weight += 1
    after = layer(one)
assert before.dtype == torch.bfloat16
assert abs(float(after - before) - 1) < 0.1, (before, after)
"""


def test_weights_that_change_inside_are_seen() -> None:
    """On a CPU all steps of a round are one block. Another process: on some processors PyTorch takes
    other kernels from the first product in bf16 on."""
    ran = processes.run([sys.executable, "-c", CHANGED_INSIDE])
    assert ran.returncode == 0, ran.stderr

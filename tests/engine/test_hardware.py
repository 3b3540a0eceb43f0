"""The precision that models compute in, and what makes a CPU repeat its results."""

import os
import subprocess
import sys

import pytest

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


MKL = """
import ctypes, os, sys
import torch
from semisfl.engine.hardware import Hardware

Hardware("cpu")
torch.ones(64, 64) @ torch.ones(64, 64)
mkl = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
if not hasattr(mkl, "mkl_serv_cbwr_get"):
    sys.exit("no MKL")
print(mkl.mkl_serv_get_dynamic(), mkl.mkl_serv_cbwr_get(-1))
"""


def test_matrix_products_repeat_exactly_on_a_cpu() -> None:
    """MKL chooses no number of threads itself, and is in its repeatable mode."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MKL_")}
    done = subprocess.run(
        [sys.executable, "-c", MKL], env=environment, capture_output=True, text=True, timeout=120
    )
    if done.stderr.strip().endswith("no MKL"):
        pytest.skip("this torch has no MKL that can be asked")
    assert done.stdout.split() == ["0", "2"], done.stderr


DENORMAL = """
from concurrent.futures import ThreadPoolExecutor
import torch
from semisfl.engine.hardware import Hardware

def bits():
    small = torch.full((1 << 20,), 1e-30)
    return [int((small * factor).view(torch.int32).any()) for factor in (1e-5, 1e-9)]

torch.set_num_threads(2)
Hardware("cpu")
with ThreadPoolExecutor(1) as pool:
    print(*bits(), *pool.submit(bits).result())
"""


def test_values_below_the_normal_range_are_zero_in_all_threads() -> None:
    """Another process, as torch's threads must not have started before."""
    done = processes.run([sys.executable, "-c", DENORMAL])
    assert done.stdout.split() == ["1", "0", "1", "0"], done.stderr

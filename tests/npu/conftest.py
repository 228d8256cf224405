"""One compute thread, since the emulated operators are many and tiny; real schemas where torch_npu is installed."""

import importlib.util
import sys
import warnings
from pathlib import Path

import torch

torch.set_num_threads(1)
# For make_npu_tiny.
sys.path.append(str(Path(__file__).parents[2] / "scripts"))
if importlib.util.find_spec("torch_npu") is not None:
    with warnings.catch_warnings():
        # It misses CANN, which the stub libraries stand in for.
        warnings.simplefilter("ignore")
        import torch_npu  # noqa: F401 - registers operators

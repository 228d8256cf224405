"""One compute thread: the emulated operators are many and tiny. Where torch_npu is installed its schemas are the real ones."""

import importlib.util
import warnings

import torch

torch.set_num_threads(1)
if importlib.util.find_spec("torch_npu") is not None:
    with warnings.catch_warnings():
        # It misses CANN, which the stub libraries stand in for.
        warnings.simplefilter("ignore")
        import torch_npu  # noqa: F401 - registers operators

"""The Ascend backend on a CPU: the adapters of k3svc.ops.npu over emulated operators that enforce their contracts.

Loaded under the device name `npu-emulated` only. Slow and exact by design: it finds wrong calls, not slow ones.
"""

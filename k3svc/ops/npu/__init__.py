"""The Ascend backend: thin adapters of the operation table onto torch_npu, sgl-kernel-npu and sglang's kernels."""

"""The cuda backend: the operation table as Triton kernels on an NVIDIA GPU; imported where `ops.load` chooses it."""

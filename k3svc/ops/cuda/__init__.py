"""The cuda backend: the operation table as Triton kernels on an NVIDIA GPU. Imported only where `ops.load` chooses it."""

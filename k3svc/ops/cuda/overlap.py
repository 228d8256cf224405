"""Programmatic dependent launch: a kernel may start while the one before it drains, and waits before it reads.

Every kernel that is launched with OVERLAP calls `begin` first, or `release` and `wait` in either order; before it has
waited it reads nothing that the kernel before wrote. What it loads earlier (weights) comes in while that one ends.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Kernels run in Triton's interpreter, which knows nothing of the sort."""
OVERLAP = {"launch_pdl": not INTERPRETED.value}
SAME_BITS = {"enable_fp_fusion": False}
"""For kernels that are compiled several times and have to agree: of two products in a sum the compiler takes one into a
fused operation, and which one differs from one compilation to the next. What is to be fused says `tl.fma`."""


@triton.jit
def release():
    """Lets the next kernel start once all programs of this one have come here."""
    if not INTERPRETED:
        gdc_launch_dependents()


@triton.jit
def wait():
    """Waits until the kernel before has ended and its writes are there."""
    if not INTERPRETED:
        gdc_wait()


@triton.jit
def begin():
    """Both."""
    release()
    wait()

"""Programmatic dependent launch: a kernel may start while the one before it drains, and waits before it reads.

Every kernel that is launched with OVERLAP calls `begin` first; nothing that an earlier kernel wrote is read before it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Kernels run in Triton's interpreter, which knows nothing of the sort."""
OVERLAP = {"launch_pdl": not INTERPRETED.value}


@triton.jit
def begin():
    """Lets the next kernel start, and waits until the one before has ended and its writes are there."""
    if not INTERPRETED:
        gdc_launch_dependents()
        gdc_wait()

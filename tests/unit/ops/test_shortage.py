"""What a full device comes to in words."""

import pytest
import torch

from k3svc.errors import BackendError
from k3svc.ops.shortage import room_for, shortage, step_fault

ALLOCATOR = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 30.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 1.94 MiB is "
    "free. Process 3553 has 924.00 MiB memory in use. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
DRIVER = RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com")


def test_one_line_without_the_processes_and_the_advice():
    assert shortage(ALLOCATOR) == (
        "CUDA out of memory. Tried to allocate 30.00 MiB. "
        "GPU 0 has a total capacity of 139.80 GiB of which 1.94 MiB is free"
    )
    assert shortage(DRIVER) == "CUDA error: out of memory"
    assert shortage(RuntimeError("CUDA error: an illegal memory access")) is None


@pytest.mark.parametrize("error", [ALLOCATOR, DRIVER])
def test_weights_without_room_are_an_error_of_start_up(error: RuntimeError):
    told = pytest.raises(BackendError, match=r"no room for the weights: CUDA .*; end what else runs on it")
    with told as caught, room_for("the weights"):
        raise error
    assert "\n" not in caught.value.message


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="else"), room_for("the weights"):
        raise RuntimeError("something else")


def test_a_step_says_which_settings_matter():
    message = step_fault("the step", ALLOCATOR).message
    assert message.startswith("the step found no memory on the device: CUDA out of memory. Tried to allocate 30.00 MiB")
    assert {"cache.num_pages", "prefill.chunk_tokens", "decode.max_batch"} <= set(message.replace(",", " ").split())
    assert step_fault("the step", ValueError("x")).message == "the step failed: ValueError: x"

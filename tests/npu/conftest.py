"""One compute thread: the emulated operators are many and tiny."""

import torch

torch.set_num_threads(1)

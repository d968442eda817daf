"""Data parallel with fewer bytes: gradients are sent as bf16 or fp16, or by PowerSGD as low rank.

    sealring run -n 4 examples/ddp_hooks.py --hook powersgd

A hook changes what is sent, and so changes the losses a little. sealring seals what is sent.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gpt

HOOKS = ("bf16", "fp16", "powersgd")
EXACT_STEPS = 4
"""PowerSGD starts after the first steps, in which gradients change most."""


def train(steps: int, hook: str = "bf16", device: str = "cpu") -> list[float]:
    model = DistributedDataParallel(gpt.make_model(device))
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=EXACT_STEPS
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        # Wrapped in a lambda, because DDP refuses this hook by its name for backends other than
        # NCCL. It works with any backend that sums bf16.
        model.register_comm_hook(
            None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)
        )
    optimizer = gpt.make_optimizer(model.parameters())
    losses = gpt.fit(model, optimizer, steps, dist.get_rank(), dist.get_world_size())
    return gpt.mean_over_ranks(losses)


def main() -> None:
    parser = gpt.options(__doc__)
    parser.add_argument("--hook", choices=HOOKS, default=HOOKS[0])
    options = parser.parse_args()
    gpt.join(options)
    gpt.report(train(options.steps, options.hook, device=options.device), as_json=options.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

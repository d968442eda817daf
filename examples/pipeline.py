"""Pipeline parallel: each rank holds some of the layers, and micro-batches flow through the ranks.

sealring run -n 4 examples/pipeline.py --schedule 1f1b
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import gpt

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MICRO_BATCHES = 4


def train(steps: int, schedule: str = "gpipe", device: str = "cpu") -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = gpt.make_model()
    own = model[rank * len(model) // world : (rank + 1) * len(model) // world].to(device)
    stage = PipelineStage(own, rank, world, torch.device(device))
    pipeline = SCHEDULES[schedule](stage, n_microbatches=MICRO_BATCHES, loss_fn=gpt.loss_of)
    optimizer = gpt.make_optimizer(own.parameters())

    means = torch.zeros(steps)
    for step in range(steps):
        inputs, targets = (part.contiguous() for part in gpt.batch(step, device=device))
        losses: list[torch.Tensor] = []  # losses of the micro-batches, only on the last stage
        optimizer.zero_grad()
        if stage.is_last:
            pipeline.step(*([inputs] if stage.is_first else []), target=targets, losses=losses)
            means[step] = torch.stack(losses).detach().mean()
        else:
            pipeline.step(*([inputs] if stage.is_first else []))
        optimizer.step()
    dist.broadcast(means, src=world - 1)
    return means.tolist()


def main() -> None:
    parser = gpt.options(__doc__)
    parser.add_argument("--schedule", choices=SCHEDULES, default="gpipe")
    options = parser.parse_args()
    gpt.join(options)
    gpt.report(train(options.steps, options.schedule, device=options.device), as_json=options.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

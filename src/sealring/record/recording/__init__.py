"""What training writes down: each worker's signed account of every interval.

noted  what happened since the last statement: data, checkpoints, groups, collectives, links
chain  one rank's statements in a run's folder, and the run's log, which rank 0 keeps
run    `record_run`: all of these together, for a training script, and what reports to it by itself

Knows no torch.
"""

"""What training records: each worker's signed statement about every interval.

noted  what happened since the last statement: data, checkpoints, groups, collectives, links
chain  one rank's statements in a run's folder, and the run's log, which rank 0 keeps
run    `record_run`, which does all of this for a training script, and the functions that report
       to it

Nothing here imports torch.
"""

"""The planner: predicts a training step on machines that are not rented yet.

models        the models, and where they come from
profiles      what a machine can do; every figure has its source
collectives   how long a collective takes: simulates the engines' own programs with a clock
layouts       one step with DDP, FSDP, or tensor x pipeline parallelism
answer        answers a question, with the time to form the job; tune() for DDP
fit           makes a profile from a bench run
validate      compares predictions with measurements, and with published results
"""

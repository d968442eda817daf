"""What a training step will take on machines that are not rented yet.

models        what is trained, and where it comes from
profiles      what a machine can do, figure by figure with its source
simulate      programs without data, by a clock
collectives   how long a collective takes: the engines' own programs, simulated
layouts       one step: DDP against FSDP against tensor x pipeline parallelism
forming       how long a job takes to form
answer        all of it for one question; tuning: for DDP
fit, fit_gpu  a profile from a bench run; validate: whether it predicts
reproduce     what the profile of published figures predicts for what others have published
"""

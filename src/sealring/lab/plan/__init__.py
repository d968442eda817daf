"""What a training step will take on machines that are not rented yet.

models        what is trained, and where it comes from
profiles      what a machine can do, figure by figure with its source
collectives   how long a collective takes: the engines' own programs, simulated by a clock
layouts       one step: DDP against FSDP against tensor x pipeline parallelism
answer        all of it for one question, with how long a job takes to form; tune() for DDP
fit           a profile from a bench run
validate      whether a profile predicts what was measured here, and what others have published
"""

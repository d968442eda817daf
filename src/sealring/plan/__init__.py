"""What a training step will take on machines that are not rented yet.

model         what is trained; models and named: where it comes from
buckets       how DDP cuts the gradients
profiles      what a machine can do, figure by figure with its source
collectives   how long a collective takes: the engines' own programs, by a clock
timeline      one step: computing beside communicating
memory        what a rank holds
layouts       DDP against FSDP against tensor x pipeline parallelism
answer        all of it for one question
fit           a profile from a bench run; validate: whether it predicts; tuning: for DDP
theory        rounds, traffic and fan-in; reproduce: what others have published
"""

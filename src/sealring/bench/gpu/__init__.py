"""`sealring bench gpu`: what sealing costs where the GPU that holds a tensor does it.

kernels     the kernels by themselves
groups      several ranks on one GPU: sealed over each wire, and the same path unsealed
allreduce   all-reduces of these against each other, against Gloo and against NCCL
steps       a DDP step of GPT-2 over a wire, sealed and unsealed
bars        what was measured, each beside what is asked of it
"""

"""make fuzz-api: random calls of torch.distributed on sealring and on Gloo, compared."""

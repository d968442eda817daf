"""Records sealed and opened by the GPU that holds the tensor."""

"""The CUDA engine: the GPU that holds the tensor seals and opens its records."""

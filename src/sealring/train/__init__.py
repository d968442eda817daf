"""For training scripts: integrations with frameworks, and tensors parked outside the GPU."""

"""What training scripts use besides the group: frameworks, and state kept outside the GPU."""

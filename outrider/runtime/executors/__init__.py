"""What runs a forward pass: eagerly, compiled ahead of time, or as a CUDA graph."""

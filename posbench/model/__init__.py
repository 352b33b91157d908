"""The LLaMA-style decoder: its layers, its loss, and its size in parameters, FLOPs and cache bytes."""

"""Inspect, convert and prove PyTorch FSDP checkpoints."""

__version__ = "0.1.0"

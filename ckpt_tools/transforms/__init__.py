"""Turns entries into other entries: names, types, optimizers, frameworks."""

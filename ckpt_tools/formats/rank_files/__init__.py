"""Per-rank files of DTensors."""

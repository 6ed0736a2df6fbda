"""Moves tensor bytes as plans say; knows no format."""

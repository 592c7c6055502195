"""Checkpoints in, containers out."""

"""Containers, expert records, memory budget and reads: files and bytes, never a hidden state."""

"""What the commands call."""

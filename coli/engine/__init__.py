"""The decode loop: prefill, propose, verify, sample, commit."""

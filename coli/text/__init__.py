"""Tokenizer, detokenizer and chat templates: text in, ids out, and back."""

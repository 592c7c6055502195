"""Grammars as byte automata; knows neither model nor tokenizer beyond ids and bytes."""

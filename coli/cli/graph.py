"""`coli graph`: n-grams of the user's own text to draft from."""

from __future__ import annotations

from coli.cli.index_commands import index_group

command = index_group(
    "graph",
    "Make and inspect n-gram graphs for --graph from text of the kind the model will write.",
    draft_special=False,
)

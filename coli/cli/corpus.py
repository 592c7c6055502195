"""`coli corpus`: frozen token ids to draft from, as one mapped file."""

from __future__ import annotations

from coli.cli.index_commands import index_group

command = index_group(
    "corpus",
    "Make and inspect corpora of token ids for --corpus: [TOKENS] logs, id files or text.",
    draft_special=True,
)

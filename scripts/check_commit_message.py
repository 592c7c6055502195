"""Check the form of a commit message: `area: imperative subject`, a lower-case area, then a blank line and a body.

python scripts/check_commit_message.py FILE      (git's commit-msg hook calls it)
"""

import re
import sys
from pathlib import Path

SUBJECT = re.compile(r"[a-z0-9][a-z0-9_./, -]*: [^\s].*[^\s.]")
GENERATED = ("Merge ", "Revert ", "fixup! ", "squash! ")
MAX_SUBJECT = 100


def problem(message: str) -> str | None:
    """What is wrong with `message`, None if nothing is. Lines that begin with # are git's."""
    lines = [line.rstrip() for line in message.splitlines() if not line.startswith("#")]
    while lines and not lines[0]:
        lines.pop(0)
    if not lines:
        return "the message is empty"
    subject = lines[0]
    if subject.startswith(GENERATED):
        return None
    if not SUBJECT.fullmatch(subject):
        return f"expected `area: imperative subject` (lower-case area, no final period), found: {subject}"
    if len(subject) > MAX_SUBJECT:
        return f"the subject has {len(subject)} characters, at most {MAX_SUBJECT}"
    verb = subject.split(": ", 1)[1].split()[0]
    if verb[0].isupper() and not verb.isupper():
        return f"the subject begins with a capital ({verb}); write `area: imperative subject`"
    if re.fullmatch(r"(adds|added|adding|fixes|fixed|fixing|changes|changed|removes|removed|updates|updated)", verb):
        return f"write the subject as an order: not {verb!r}"
    if len(lines) > 1 and lines[1]:
        return "put an empty line between subject and body"
    return None


def main() -> int:
    """0 if the message in the file named first is in form."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    found = problem(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if found:
        print(f"commit message: {found}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

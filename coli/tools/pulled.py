"""Which container is behind a name: a folder, a name under the model home, or a hub id that was pulled.

Called by the command line and `coli.speculant`; loads no model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from coli.errors import OptionError

RECORD = "pull.json"  # in the container's folder: where it came from
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def named_model(name: str, home: Path | None, origin: str) -> Path:
    """The folder meant by `name`. Raises OptionError that begins with `origin` and says what to type."""
    path = Path(name)
    if path.exists():
        return path
    if home is not None and not path.is_absolute():
        if (home / path).exists():
            return home / path
        if _HUB_ID.fullmatch(name):
            pulled = _pulled(name, home)
            if pulled is not None:
                return pulled
            raise OptionError(f"{origin}: {name}: no such folder, and not pulled yet; type: coli pull hf:{name}")
    where = f", and no model of that name under {home}" if home is not None and not path.is_absolute() else ""
    raise OptionError(f"{origin}: {name}: no such file or folder{where}")


def _pulled(hub_id: str, home: Path) -> Path | None:
    """The container that `coli pull hf:HUB_ID` made, whatever its name; of several revisions the first by name."""
    for record in sorted(home.glob(f"*/{RECORD}")):
        try:
            known = json.loads(record.read_text())
        except (OSError, ValueError):
            continue
        what = known.get("what") if isinstance(known, dict) else None
        if isinstance(what, str) and what.partition("@")[0].lower() == f"hf:{hub_id}".lower():
            return record.parent
    return None

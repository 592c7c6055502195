"""What the store needs to know of one layer's expert records in a container; `container.ExpertLayout` fits."""

from pathlib import Path
from typing import Protocol


class RecordLayout(Protocol):
    """E records of one layer, back to back in one file."""

    @property
    def path(self) -> Path: ...

    @property
    def offset(self) -> int:
        """File offset of expert 0, in bytes."""
        ...

    @property
    def record_bytes(self) -> int: ...

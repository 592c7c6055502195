"""GraphBuilder: a graph from the user's own files, as `coli graph build` makes it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coli.errors import OptionError
from coli.speculant.configs import GraphConfig
from coli.speculant.models import Notice, model_folder, to_stderr

if TYPE_CHECKING:
    from coli.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Graph:
    """What was built. contexts: distinct ones by order; num_tokens: ids it was counted on."""

    num_tokens: int
    num_documents: int
    contexts: dict[int, int]
    max_order: int
    nbytes: int


class GraphBuilder:
    """Builds one graph at a time and saves it; what was built and not saved goes with the builder."""

    def __init__(
        self,
        tokenizer_name: str | None = None,
        max_order: int | None = None,
        chunk_size: int | None = None,
        hf_token: str | None = None,
        download_mode: str | None = None,
        *,
        span_files: bool = False,
        notice: Notice = to_stderr,
    ) -> None:
        """What is left out comes from GraphConfig. span_files: let n-grams run from one file into the next."""
        given = {
            "tokenizer_name": tokenizer_name,
            "max_order": max_order,
            "chunk_size": chunk_size,
            "hf_token": hf_token,
            "download_mode": download_mode,
        }
        self.config = dataclasses.replace(GraphConfig(), **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
        self._span_files, self._notice = span_files, notice
        self._built: Path | None = None

    def build_from_files(self, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Graph:
        """Count the n-grams of files, folders and globs, or of one. Raises OptionError, CorpusError, WriteError."""
        from coli.tools.corpus_build import BuildOptions, build_index

        # a single path is a sequence too, of its characters
        names = [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
        if not names:
            raise OptionError("build_from_files: no files given")
        tokenizer, vocab_size = self._tokenizer()
        self._built = None
        folder = Path(tempfile.mkdtemp(prefix="coli-graph-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        options = BuildOptions(
            max_order=self.config.max_order,
            span_files=self._span_files,
            piece_chars=self.config.chunk_size,
            banned=frozenset(tokenizer.special_ids),
        )
        built = folder / "graph.safetensors"
        header = build_index(names, built, tokenizer, vocab_size, options)
        self._built = built
        return Graph(
            header.num_ids,
            header.num_documents,
            dict(enumerate(header.contexts, 1)),
            header.max_order,
            built.stat().st_size,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the graph built last: a safetensors file whatever its name, whole or not at all."""
        from coli.tools.output_file import checked_target, whole_file

        if self._built is None:
            raise OptionError(f"{os.fspath(path)}: nothing to save: call build_from_files first")
        target = Path(path)
        with whole_file(checked_target(target)) as file, self._built.open("rb") as built:
            shutil.copyfileobj(built, file)
        if target.suffix != ".safetensors":
            self._notice(f"{target}: a safetensors file under that name; nothing here reads or writes pickles")

    def _tokenizer(self) -> tuple[Tokenizer, int]:
        from coli.text.vocabulary import model_vocabulary

        name = self.config.tokenizer_name
        if name is None:
            from coli.speculant.configs import VerifierConfig

            name = VerifierConfig().model_name
        return model_vocabulary(model_folder(name, "tokenizer_name"))

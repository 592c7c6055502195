"""Checkpoints of other formats become coli containers: read tensor by tensor, quantized, whole or not at all.

`convert` is what the command line calls; it picks the format. Raises ColiError subclasses, each one line.
"""

from pathlib import Path

from coli.convert.conversion import Notice, Progress
from coli.convert.hf import convert_hf
from coli.convert.options import ConvertOptions, ConvertReport

__all__ = ["ConvertOptions", "ConvertReport", "Notice", "Progress", "convert"]


def convert(
    src: Path, dst: Path, options: ConvertOptions, notice: Notice, progress: Progress | None = None
) -> ConvertReport:
    """Convert the model at `src` (a Hugging Face folder or a GGUF file) into the container folder `dst`.

    `notice` gets whole lines; `progress` gets source bytes done and in all, from the calling thread.
    """
    if src.suffix == ".gguf" and not src.is_dir():
        from coli.convert.gguf import convert_gguf  # the gguf package takes a while to import

        return convert_gguf(src, dst, options, notice, progress)
    return convert_hf(src, dst, options, notice, progress)

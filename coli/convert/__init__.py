"""Checkpoints of other formats become coli containers: read tensor by tensor, quantized, whole or not at all.

`convert` is what the command line calls; it picks the format. Raises ColiError subclasses, each one line.
"""

from pathlib import Path

from coli.convert.conversion import Notice, Progress
from coli.convert.hf import convert_hf
from coli.convert.options import ConvertOptions, ConvertReport
from coli.errors import OptionError
from coli.kernels import runtime

__all__ = ["ConvertOptions", "ConvertReport", "Notice", "Progress", "convert"]


def convert(
    src: Path, dst: Path, options: ConvertOptions, notice: Notice, progress: Progress | None = None
) -> ConvertReport:
    """Convert the model at `src` (a Hugging Face folder or a GGUF file) into the container folder `dst`.

    `notice` gets whole lines; `progress` gets source bytes done and in all, from the calling thread.
    """
    runtime.configure(options.simd, options.kernel_cache, options.threads)
    if _is_gguf(src):
        from coli.convert.gguf import convert_gguf  # the gguf package takes a while to import

        return convert_gguf(src, dst, options, notice, progress)
    files = sorted(path.name for path in src.glob("*.gguf")) if src.is_dir() else []
    if files and not (src / "config.json").exists():
        raise OptionError(f"{src}: a folder of GGUF files; give one of them: {', '.join(files[:8])}")
    return convert_hf(src, dst, options, notice, progress)


def _is_gguf(path: Path) -> bool:
    """By name, or by its first bytes where a download has another name."""
    if path.suffix == ".gguf":
        return not path.is_dir()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"

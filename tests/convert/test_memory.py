"""Peak memory of a conversion does not follow the size of the model."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from convert.checkpoints import ORACLE, edit_config

HIDDEN, EXPERTS, INTER, VOCAB = 1024, 64, 1024, 65536
PEAK_BYTES = 450_000_000  # on two threads; of which the interpreter with numba is about 150 MB
SCRIPT = """
import sys
from pathlib import Path
from coli.convert import ConvertOptions, convert
print(convert(Path(sys.argv[1]), Path(sys.argv[2]), ConvertOptions(threads=2), print).peak_memory_bytes)
"""


def write_large_checkpoint(folder: Path) -> int:
    """An olmoe of 2 layers in bfloat16 with fused experts; returns the bytes of its tensors (1.1 GB)."""
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (HIDDEN,)}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCAB, HIDDEN))
    for prefix in ("model.layers.0.", "model.layers.1."):
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        norms = ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm")
        shapes |= {f"{prefix}{name}.weight": (HIDDEN,) for name in norms}
        shapes[f"{prefix}mlp.gate.weight"] = (EXPERTS, HIDDEN)
        shapes[f"{prefix}mlp.experts.gate_up_proj"] = (EXPERTS, 2 * INTER, HIDDEN)
        shapes[f"{prefix}mlp.experts.down_proj"] = (EXPERTS, HIDDEN, INTER)
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    noise = np.random.default_rng(7).standard_normal(1 << 22, np.float32)
    pattern = (noise.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    folder.mkdir()
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, end, len(pattern)):
            file.write(pattern[: end - start])
    (folder / "config.json").write_bytes((ORACLE / "olmoe-base" / "config.json").read_bytes())
    edit_config(folder, hidden_size=HIDDEN, num_experts=EXPERTS, intermediate_size=INTER, vocab_size=VOCAB)
    return end


@pytest.mark.slow
def test_peak_memory_is_a_few_row_blocks(tmp_path: Path) -> None:
    total = write_large_checkpoint(tmp_path / "source")
    assert total > 1_000_000_000
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "source"), str(tmp_path / "model")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.splitlines()[-1]) < PEAK_BYTES

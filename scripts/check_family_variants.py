"""The variants of tests/model/test_family_variants.py against transformers: largest difference of the logits of each.

    python scripts/check_family_variants.py [PATTERN...]

Needs torch and transformers; takes the tests' own tables, random weights and float64 model, and asks transformers for
the same folder's logits. transformers 5.24 asks for longrope's factors without the length of the sequence and so gets
the short ones; that model is asked once more with the length.
"""

import argparse
import fnmatch
import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path[:0] = [str(Path(__file__).parent.parent / "tests"), str(Path(__file__).parent.parent / "tests/model")]
from slow_model import SlowModel  # noqa: E402
from test_family_variants import COMMON, IDS, VARIANTS, random_tensors, write_folder  # noqa: E402


def logits(folder: Path, told_length: bool) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for module in model.modules():
        if told_length and getattr(module, "rope_type", "") == "longrope":
            module.rope_init_fn = functools.partial(module.rope_init_fn, seq_len=len(IDS))
    with torch.no_grad():
        found: np.ndarray = model.eval()(torch.tensor([IDS]), use_cache=False).logits[0].numpy()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", default=["*"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name, changes in VARIANTS.items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in arguments.patterns):
            continue
        config: dict[str, Any] = COMMON | changes
        tensors = random_tensors(config)
        want = SlowModel(config, tensors).logits(IDS)
        for told_length in (False, True) if changes["model_type"] == "phimoe" else (False,):
            with tempfile.TemporaryDirectory() as folder:
                found = logits(write_folder(Path(folder) / "model", config, tensors), told_length)
            same = (found.argmax(axis=1) == want.argmax(axis=1)).sum()
            print(
                f"{name}{', with the length' if told_length else ''}: {np.abs(found - want).max():.1e} of"
                f" {np.abs(want).max():.1f}, argmax {same} of {len(IDS)}"
            )


if __name__ == "__main__":
    main()

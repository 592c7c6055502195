"""kv_b_proj of latent attention as the two matrices per head that the absorbed form multiplies with.

Of each head's rows in kv_b_proj (qk_nope_head_dim + v_head_dim, kv_lora_rank), k_up is the first part transposed and
v_up the second; the rows of a head are padded with zeros to whole tiles. Nothing is computed, so nothing is rounded.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coli.convert.source import SourceTensor, TensorView
from coli.errors import CheckpointError
from coli.model.config import LatentSpec, ModelSpec
from coli.store.layout import TILE_ROWS, round_up

_SUFFIX = ".self_attn.kv_b_proj.weight"


@dataclass(frozen=True, slots=True)
class HeadMatrices(TensorView):
    """k_up or v_up inside a kv_b_proj; see source.SourceTensor."""

    heads: int
    rows: int  # of one head, unpadded
    cols: int
    skipped: int  # rows of a head in the source before this part
    head_rows: int  # rows of a head in the source
    turned: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.heads * round_up(self.rows, TILE_ROWS), self.cols)

    @property
    def row_bytes(self) -> int:
        return self.tensor.row_bytes * (self.cols if self.turned else self.rows) // round_up(self.rows, TILE_ROWS)

    def read_rows(self, start: int, stop: int) -> NDArray[np.float32]:
        padded = round_up(self.rows, TILE_ROWS)
        first, last = start // padded, -(-stop // padded)
        out = np.zeros((last - first, padded, self.cols), np.float32)
        for head in range(first, last):
            at = head * self.head_rows + self.skipped
            part = self.tensor.read_rows(at, at + (self.cols if self.turned else self.rows))
            out[head - first, : self.rows] = part.T if self.turned else part
        return out.reshape(-1, self.cols)[start - first * padded : stop - first * padded]


def with_head_matrices(
    tensors: Mapping[str, SourceTensor], spec: ModelSpec, latent: LatentSpec
) -> dict[str, SourceTensor]:
    """`tensors` with every kv_b_proj replaced by its k_up and v_up."""
    heads, nope, values = spec.num_attention_heads, latent.qk_nope_head_dim, latent.v_head_dim
    found: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith(_SUFFIX):
            found[name] = tensor
            continue
        rank, shape = latent.kv_lora_rank, (heads * (nope + values), latent.kv_lora_rank)
        if tensor.shape != shape:
            raise CheckpointError(
                f"tensor {tensor.name}: shape {list(tensor.shape)}, but config.json makes it {list(shape)}"
            )
        stem = name.removesuffix("kv_b_proj.weight")
        found[f"{stem}k_up.weight"] = HeadMatrices(tensor, heads, rank, nope, 0, nope + values, True)
        found[f"{stem}v_up.weight"] = HeadMatrices(tensor, heads, values, rank, nope, nope + values, False)
    return found

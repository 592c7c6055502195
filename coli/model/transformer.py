"""The forward: rows of token ids in, logits out. One page, in execution order.

Does not know that speculation exists: it gets rows with positions and parents, appends them to the cache of their
sequence and computes them; the caller keeps or drops them. One thread calls it.
"""

import numpy as np
from numpy.typing import NDArray

from coli.kernels import elementwise, quantize, rope
from coli.model.attention import Attention, RowTable, row_paths
from coli.model.config import ModelSpec
from coli.model.kv_cache import KVCache
from coli.model.layers import Buffers, Machine, Mlp, Projection, Rows
from coli.model.loader import LayerWeights, ModelWeights, MoeWeights
from coli.model.moe import Experts, Moe
from coli.model.rotary import rope_frequencies


class Layer:
    """One decoder layer: attention and MLP, each behind its norm, each added to the residual stream."""

    def __init__(self, spec: ModelSpec, weights: LayerWeights, experts: Experts | None) -> None:
        self._eps = spec.rms_norm_eps
        self._norms = weights.input_layernorm, weights.post_attention_layernorm
        self._attention = Attention(spec, weights)
        self._mlp: Mlp | Moe
        if isinstance(weights.mlp, MoeWeights):
            assert experts is not None
            self._mlp = Moe(spec, weights.spec.layer_idx, weights.mlp, experts)
        else:
            self._mlp = Mlp(weights.mlp)

    def __call__(self, machine: Machine, hidden: Rows, rows: RowTable, prefill: bool) -> None:
        """hidden (S, H), updated in place."""
        S, H = hidden.shape
        normed = machine.buffers.rows("normed", S, H)
        elementwise.rms_norm(hidden, self._norms[0], self._eps, normed)
        elementwise.add(hidden, self._attention(machine, normed, rows))
        elementwise.rms_norm(hidden, self._norms[1], self._eps, normed)
        if isinstance(self._mlp, Moe):
            self._mlp(machine, normed, hidden, prefill)
        else:
            elementwise.add(hidden, self._mlp(machine, normed))


class Transformer:
    """All layers of one model over one store of experts."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, experts: Experts | None, threads: int) -> None:
        self.spec = spec
        self.vocab_size = spec.vocab_size
        self._weights = weights
        self._experts = experts
        self._machine = Machine(Buffers(), threads)
        self._layers = [Layer(spec, layer, experts) for layer in weights.layers]
        self._lm_head = Projection("logits", (weights.lm_head,))
        self._frequencies = rope_frequencies(spec.rope)

    def forward(
        self,
        cache: KVCache,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        parents: NDArray[np.int64] | None,
        logit_rows: NDArray[np.int64],
        *,
        prefill: bool,
    ) -> NDArray[np.float32]:
        """S rows -> logits (len(logit_rows), V) float32; the rows are appended to `cache`.

        Args:
            token_ids, positions: (S,) int64.
            parents: (S,) row index of each row's parent, -1 for the rows already in the cache; None for a chain.
            logit_rows: rows whose logits are wanted.
        """
        S, H = len(token_ids), self.spec.hidden_size
        start = cache.length
        cache.append(S)
        cos, sin = rope.rope_table(positions, self._frequencies, self.spec.rope.attention_factor)
        rows = RowTable(cache, row_paths(start, S, parents), cos, sin)

        hidden = self._machine.buffers.rows("hidden", S, H)
        embed = self._weights.embed_tokens
        quantize.embed_rows(embed.kind, embed.weights, embed.scales, token_ids, embed.groups, hidden)
        for layer in self._layers:
            layer(self._machine, hidden, rows, prefill)
        return self._logits(hidden, logit_rows)

    def settle(self, committed_rows: NDArray[np.int64]) -> None:
        """Tell the expert store which rows of the last forward were committed."""
        if self._experts is not None:
            self._experts.settle(committed_rows)

    def _logits(self, hidden: Rows, logit_rows: NDArray[np.int64]) -> NDArray[np.float32]:
        if not len(logit_rows):
            return np.empty((0, self.vocab_size), np.float32)
        chosen = np.ascontiguousarray(hidden[logit_rows])
        elementwise.rms_norm(chosen, self._weights.norm, self.spec.rms_norm_eps, chosen)
        return self._lm_head(self._machine, chosen)[:, : self.vocab_size]

"""RopeSpec -> the table of frequencies the rope kernel turns with. Called once, when a model is opened."""

import numpy as np
from numpy.typing import NDArray

from coli.kernels import rope
from coli.model.config import RopeSpec


def rope_frequencies(spec: RopeSpec) -> NDArray[np.float64]:
    """(rotary_dim/2,) float64 radians per position, scaled as the checkpoint asks; longrope (2, rotary_dim/2)."""
    freq = rope.inv_freq(spec.theta, spec.rotary_dim)
    match spec.kind:
        case "default":
            return freq
        case "linear":
            return rope.scale_linear(freq, spec.factor)
        case "llama3":
            original = spec.original_max_position_embeddings
            return rope.scale_llama3(freq, spec.factor, spec.low_freq_factor, spec.high_freq_factor, original)
        case "longrope":
            return np.stack([freq / np.array(spec.short_factor), freq / np.array(spec.long_factor)])
        case "yarn":
            original = spec.original_max_position_embeddings
            return rope.scale_yarn(
                freq, spec.theta, spec.factor, original, spec.beta_fast, spec.beta_slow, spec.truncate
            )

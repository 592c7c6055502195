"""The stages a run needs, for `runtime.warm`; the others (convert, tests) compile when first used."""

from coli.kernels.activations import PACK_QUANTIZED, PACK_ROWS, QUANTIZE_ROWS
from coli.kernels.attention import ADD_VALUES, ATTENTION, COPY_SLOTS, KV_APPEND, SLIDE, UNIT
from coli.kernels.elementwise import CLAMPED_SWIGLU, COUNT_BAD, FUNCTIONS, POINTWISE, RMS_NORM, SWIGLU
from coli.kernels.elementwise import LAYER_NORM as ROW_LAYER_NORM
from coli.kernels.experts import PLAN_EXPERTS
from coli.kernels.indexer import LAYER_NORM, SELECT
from coli.kernels.latent import APPEND_ROWS, JOIN_HEADS, LATENT_ATTENTION, SPLIT_QUERY
from coli.kernels.latent16 import LATENT_UNITS, RECORDS
from coli.kernels.loops import OUTER, OUTER16, PANEL, TILE
from coli.kernels.match import DRAFT, SEARCH
from coli.kernels.matmul import RUN_JOBS
from coli.kernels.moe import ACCUMULATE, COMBINE
from coli.kernels.noise import ARGMAX, CANDIDATES, GUMBEL
from coli.kernels.quantize import EMBED_ROWS, PACK, QUANTIZE
from coli.kernels.rope import APPLY_ROPE, ROPE_TABLE
from coli.kernels.routing import ROUTE
from coli.kernels.suffix import CONTINUE
from coli.kernels.tape import REPLAY

RUN = (
    TILE, OUTER, OUTER16, PANEL, RUN_JOBS, UNIT, ADD_VALUES, ATTENTION, PACK_ROWS, QUANTIZE_ROWS, PACK_QUANTIZED,
    KV_APPEND, COPY_SLOTS, RMS_NORM, POINTWISE, SWIGLU, COUNT_BAD, FUNCTIONS, ROPE_TABLE, APPLY_ROPE, ROUTE, COMBINE,
    ACCUMULATE, EMBED_ROWS, PLAN_EXPERTS, ARGMAX, CANDIDATES, CONTINUE, REPLAY,
)  # fmt: skip
LATENT = (
    APPEND_ROWS,
    SPLIT_QUERY,
    LATENT_ATTENTION,
    RECORDS,
    LATENT_UNITS,
    JOIN_HEADS,
    LAYER_NORM,
    SELECT,
)  # of some families only
CLAMPED = (CLAMPED_SWIGLU,)  # of gpt-oss
SLIDING = (SLIDE,)  # of models with windows
PHIMOE = (ROW_LAYER_NORM,)
ALL = (*RUN, *LATENT, *CLAMPED, *SLIDING, *PHIMOE, QUANTIZE, PACK, GUMBEL, SEARCH, DRAFT)

"""The graph tool's Python API: build a graph, generate with it, or ask a server.

Thin over `coli.llm` and `coli.tools`; fields left out come from the settings table, so the SPECULANT variables count.
Importing it loads neither numba nor a model.
"""

from coli.speculant.builder import Graph, GraphBuilder
from coli.speculant.client import Answer, Client, Health, ServerError
from coli.speculant.configs import DraftConfig, GenerationConfig, GraphConfig, VerifierConfig
from coli.speculant.decoder import GenerationResult, SpeculativeDecoder
from coli.speculant.models import pull

__all__ = [
    "Answer",
    "Client",
    "DraftConfig",
    "GenerationConfig",
    "GenerationResult",
    "Graph",
    "GraphBuilder",
    "GraphConfig",
    "Health",
    "ServerError",
    "SpeculativeDecoder",
    "VerifierConfig",
    "pull",
]

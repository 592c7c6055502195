"""`coli graph view`: the best-known part of a graph as one HTML page without scripts.

Token nodes and n-gram nodes in two colours, edges as wide as they are likely, numbers on hover. All text comes from
files nobody vouches for: it is escaped, and the page's own policy forbids anything but inline style.
"""

from __future__ import annotations

import heapq
import html
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coli.drafts.ngram_index import NgramIndex

Context = tuple[int, ...]
TOKEN_COLOUR, NGRAM_COLOUR = "#2f9e44", "#e8590c"
WIDTH, HEIGHT = 1400, 1000
_ROUNDS = 300
_LABEL_CHARS = 24

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body {{ font: 14px system-ui, sans-serif; margin: 16px; color: #212529; background: #fff; }}
svg {{ width: 100%; height: auto; border: 1px solid #dee2e6; }}
path {{ stroke: #868e96; stroke-opacity: .35; fill: none; }}
text {{ font: 11px ui-monospace, monospace; pointer-events: none; }}
g.node:hover path {{ stroke: #1864ab; stroke-opacity: .95; }}
g.node:hover circle {{ stroke: #1864ab; stroke-width: 3; }}
.token {{ fill: {token}; }} .ngram {{ fill: {ngram}; }}
</style></head><body>
<h1>{title}</h1>
<p>{summary}</p>
<p><svg viewBox="0 0 12 12" style="width:12px;border:0"><circle class="token" cx="6" cy="6" r="6"/></svg> single tokens
<svg viewBox="0 0 12 12" style="width:12px;border:0"><circle class="ngram" cx="6" cy="6" r="6"/></svg> contexts of
several tokens; an edge leads to a token that follows, as wide as it is likely. Hover over a node for its numbers.</p>
<svg viewBox="0 0 {width} {height}" role="img">
{body}
</svg></body></html>
"""


@dataclass(frozen=True, slots=True)
class Graph:
    """The part that is shown. count: occurrences of each context (0: a token that only follows); edges: from, to,
    probability.
    """

    count: dict[Context, int]
    edges: list[tuple[Context, Context, float]]


def chosen_graph(index: NgramIndex, max_nodes: int, min_weight: float) -> Graph:
    """At most `max_nodes` nodes, half of them n-grams at most: the most frequent contexts, and what follows them.

    min_weight: least probability of an edge that is shown.
    """
    ngrams = frequent_contexts(index, max_nodes // 2, 2, index.header.max_order)
    tokens = dict(frequent_contexts(index, max_nodes - len(ngrams), 1, 1))
    edges: list[tuple[Context, Context, float]] = []
    for context, count in [*ngrams, *tokens.items()]:
        followers = ((token_id, n / count) for token_id, n in index.successors(context).items())
        edges += [(context, (token_id,), p) for token_id, p in followers if p >= min_weight]
    # tokens that follow take the places of the least frequent ones that nothing leads to
    wanted: dict[Context, float] = {}
    for _, target, probability in edges:
        wanted[target] = wanted.get(target, 0.0) + probability
    ranked = sorted(
        tokens.keys() | wanted.keys(), key=lambda node: (-wanted.get(node, 0.0), -tokens.get(node, 0), node)
    )
    shown = set(ranked[: max_nodes - len(ngrams)]) | {context for context, _ in ngrams}
    counts = dict(ngrams) | {node: index.count(node) for node in shown if len(node) == 1}
    return Graph(
        {node: counts[node] for node in sorted(shown)},
        [edge for edge in edges if edge[0] in shown and edge[1] in shown],
    )


def frequent_contexts(index: NgramIndex, limit: int, least: int, most: int) -> list[tuple[Context, int]]:
    """The `limit` most frequent contexts of `least`..`most` ids, most frequent first.

    A longer context is never more frequent than the shorter one it ends in, so the best are found from the front.
    """
    first = index.array("first")
    counts = np.diff(first)
    queue: list[tuple[int, Context]] = [(-int(counts[i]), (int(i),)) for i in np.flatnonzero(counts)]
    heapq.heapify(queue)
    found: list[tuple[Context, int]] = []
    while queue and len(found) < limit:
        negative, context = heapq.heappop(queue)
        if len(context) >= least:
            found.append((context, -negative))
        if len(context) < most:
            before = index.ids_at(index.positions(context).astype(np.int64) - len(context) - 1)
            ids, sizes = np.unique(before[before >= 0], return_counts=True)
            for token_id, size in zip(ids.tolist(), sizes.tolist(), strict=True):
                heapq.heappush(queue, (-size, (token_id, *context)))
    return found


def page(index: NgramIndex, text_of: Callable[[Context], str], max_nodes: int, min_weight: float) -> str:
    """The whole page. text_of: the text of some ids."""
    graph = chosen_graph(index, max_nodes, min_weight)
    nodes = list(graph.count)
    place = dict(zip(nodes, layout(nodes, graph.edges).tolist(), strict=True))
    largest = max(graph.count.values(), default=1) or 1
    leaving: dict[Context, list[tuple[Context, float]]] = {}
    for source, target, probability in graph.edges:
        leaving.setdefault(source, []).append((target, probability))
    parts = []
    for node in nodes:
        edges = sorted(leaving.get(node, []), key=lambda edge: (-edge[1], edge[0]))
        radius = 4 + 14 * (graph.count[node] / largest) ** 0.5
        parts.append(_node(node, graph.count[node], edges, place, radius, text_of))
    title = html.escape(f"{index.path.name}: {len(nodes)} of {sum(index.header.contexts)} contexts")
    summary = html.escape(
        f"{index.header.num_ids} ids, orders 1..{index.header.max_order}; edges of at least {min_weight:g} are shown"
    )
    return _PAGE.format(
        title=title,
        summary=summary,
        token=TOKEN_COLOUR,
        ngram=NGRAM_COLOUR,
        width=WIDTH,
        height=HEIGHT,
        body="\n".join(parts),
    )


def _node(
    node: Context,
    count: int,
    edges: list[tuple[Context, float]],
    place: dict[Context, list[float]],
    radius: float,
    text_of: Callable[[Context], str],
) -> str:
    x, y = place[node]
    lines = [f"{text_of(node)!r}: order {len(node)}, seen {count} times"]
    paths = []
    for target, probability in edges:
        to_x, to_y = place[target]
        width = max(0.4, 6 * probability)
        bend_x, bend_y = (x + to_x) / 2 + (to_y - y) / 8, (y + to_y) / 2 - (to_x - x) / 8
        paths.append(
            f'<path d="M{x:.1f} {y:.1f} Q{bend_x:.1f} {bend_y:.1f} {to_x:.1f} {to_y:.1f}" stroke-width="{width:.2f}"/>'
        )
        lines.append(f"{100 * probability:.1f}% {text_of(target)!r}")
    label = text_of(node)
    short = label if len(label) <= _LABEL_CHARS else label[: _LABEL_CHARS - 1] + "…"
    kind = "token" if len(node) == 1 else "ngram"
    return (
        f'<g class="node"><title>{html.escape(chr(10).join(lines))}</title>{"".join(paths)}'
        f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>'
        f'<text x="{x + radius + 2:.1f}" y="{y + 4:.1f}">{html.escape(repr(short))}</text></g>'
    )


def layout(nodes: list[Context], edges: list[tuple[Context, Context, float]]) -> NDArray[np.float64]:
    """(n, 2) places inside the picture: springs along edges, repulsion between all; always the same for one graph."""
    n = len(nodes)
    number = {node: i for i, node in enumerate(nodes)}
    angle = np.arange(n) * 2.399963229728653  # golden angle: an even spiral to start from
    at = np.sqrt((np.arange(n) + 0.5) / max(n, 1))[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1)
    sources = np.array([number[edge[0]] for edge in edges], np.int64)
    targets = np.array([number[edge[1]] for edge in edges], np.int64)
    pull = np.array([edge[2] for edge in edges])
    rest = 1.2 / max(n, 1) ** 0.5
    for step in range(_ROUNDS if n > 1 else 0):
        away = at[:, None, :] - at[None, :, :]
        distance = np.maximum((away**2).sum(2), 1e-6)
        force = (away * (rest**2 / distance)[:, :, None]).sum(1)
        along = at[targets] - at[sources]
        spring = along * (np.linalg.norm(along, axis=1) * pull / rest)[:, None]
        np.add.at(force, sources, spring)
        np.add.at(force, targets, -spring)
        length = np.maximum(np.linalg.norm(force, axis=1, keepdims=True), 1e-9)
        at += force / length * np.minimum(length, 0.1 * (1 - step / _ROUNDS))
    low, high = at.min(0, initial=np.inf), at.max(0, initial=-np.inf)
    span = np.maximum(high - low, 1e-9)
    places: NDArray[np.float64] = 40.0 + (at - low) / span * np.array([WIDTH - 240, HEIGHT - 80])
    return places

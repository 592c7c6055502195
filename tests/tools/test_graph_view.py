"""The page shows the most frequent contexts, keeps to its caps, and no text from a file can become markup."""

import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from drafts.slow_index import count_successors
from drafts.test_index import build, random_documents

from coli.drafts.ngram_index import NgramIndex
from coli.tools.graph_view import chosen_graph, frequent_contexts, page


@pytest.fixture
def index(tmp_path: Path) -> NgramIndex:
    import random

    return build(tmp_path / "index", random_documents(random.Random(8), 1500, 12))


def test_the_most_frequent_contexts_of_all_orders_are_found(index: NgramIndex):
    import random

    counts = count_successors(random_documents(random.Random(8), 1500, 12), 5)
    for least, most in ((1, 1), (2, 5), (1, 5)):
        sizes = sorted((sum(f.values()) for c, f in counts.items() if least <= len(c) <= most), reverse=True)
        found = frequent_contexts(index, 30, least, most)
        assert [count for _, count in found] == sizes[:30]
        assert all(sum(counts[context].values()) == count for context, count in found)


@pytest.mark.parametrize(("max_nodes", "min_weight"), [(2, 0.0), (10, 0.1), (40, 0.5), (1000, 0.0)])
def test_nodes_and_weights_keep_to_their_limits(index: NgramIndex, max_nodes: int, min_weight: float):
    graph = chosen_graph(index, max_nodes, min_weight)
    kinds = Counter(len(node) > 1 for node in graph.count)
    assert sum(kinds.values()) <= max_nodes
    assert kinds[True] <= max_nodes // 2
    assert all(probability >= min_weight for _, _, probability in graph.edges)
    assert all(source in graph.count and target in graph.count for source, target, _ in graph.edges)
    for source, target, probability in graph.edges:
        assert probability == pytest.approx(index.successors(source)[target[0]] / graph.count[source])


def test_the_page_is_well_formed_and_the_same_every_time(index: NgramIndex):
    text = page(index, str, 30, 0.1)
    assert text == page(index, str, 30, 0.1)
    picture = text[text.index('<svg viewBox="0 0 1400') : text.rindex("</svg>") + 6]
    root = ElementTree.fromstring(picture)
    assert len(root.findall("g")) == len(chosen_graph(index, 30, 0.1).count)
    for circle in root.iter("circle"):
        assert 0 <= float(circle.attrib["cx"]) <= 1400
        assert 0 <= float(circle.attrib["cy"]) <= 1000


def test_text_with_markup_in_it_stays_text(index: NgramIndex):
    evil = "</title></svg><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{}\x00"
    text = page(index, lambda ids: evil * len(ids), 20, 0.0)
    assert not re.search(r"<script|<img|onerror=alert\(1\)>", text)
    assert set(re.findall(r"<([a-z0-9]+)", text)) <= {
        "html", "head", "meta", "title", "style", "body", "h1", "p", "svg", "g", "path", "circle", "text",
    }  # fmt: skip
    assert "script-src" not in text
    assert "default-src 'none'" in text

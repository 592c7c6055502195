"""Merging proposals: equal tokens share a node, the likeliest paths come first, any prefix is a tree."""

import itertools
import random

from coli.drafts.base import ROOT, Draft
from coli.drafts.trie import DraftChain, DraftTrie


def chance_of(*by_source: float):
    return lambda source, match_length, depth: by_source[source]


def test_equal_tokens_below_one_node_merge_and_keep_their_owners():
    trie = DraftTrie(10)
    trie.add(Draft.chain([1, 2, 3], "grammar", 2), 0)
    trie.add(Draft.chain([1, 2, 4], "corpus", 5), 1)
    assert trie.token_ids == [1, 2, 3, 4]
    assert trie.parents == [ROOT, 0, 1, 1]
    assert trie.owners == [[(0, 2, 0), (1, 5, 0)], [(0, 2, 1), (1, 5, 1)], [(0, 2, 2)], [(1, 5, 2)]]


def test_a_continuation_hangs_below_the_chain_it_follows():
    trie = DraftTrie(10)
    end = trie.add(Draft.chain([1, 2], "grammar"), 0)
    trie.add(Draft.chain([7], "corpus", 4), 1, end, 2)
    assert trie.parents == [ROOT, 0, 1]
    assert trie.owners[2] == [(1, 4, 2)]


def test_ids_outside_the_vocabulary_are_left_out_with_what_hangs_on_them():
    trie = DraftTrie(10)
    trie.add(Draft((1, 10, 3, -1, 5), (ROOT, 0, 1, ROOT, 0), "bad"), 0)
    assert trie.token_ids == [1, 5]
    assert trie.parents == [ROOT, 0]


def test_the_likeliest_path_comes_first_and_siblings_share_one_probability():
    trie = DraftTrie(10)
    trie.add(Draft.chain([1, 2], "good"), 0)
    trie.add(Draft.chain([3, 4], "bad"), 1)
    order, chances = trie.best_first(4, chance_of(0.8, 0.5))
    assert [trie.token_ids[node] for node in order] == [1, 2, 3, 4]
    assert [round(chance, 6) for chance in chances] == [0.8, 0.64, 0.1, 0.05]
    assert sum(chance for node, chance in zip(order, chances, strict=True) if trie.parents[node] == ROOT) <= 1


def test_one_path_has_no_siblings():
    trie = DraftTrie(10)
    trie.add(Draft.chain([1, 2], "good"), 0)
    trie.add(Draft.chain([1, 5, 6], "bad"), 1)
    order, _ = trie.best_first(9, chance_of(0.8, 0.5), one_path=True)
    assert [trie.token_ids[node] for node in order] == [1, 2]
    assert trie.draft(order, "good").is_chain


def test_any_prefix_of_the_order_is_a_draft_with_falling_chances():
    rng = random.Random(3)
    for _ in range(50):
        trie = DraftTrie(6)
        for source in range(3):
            parents = [rng.randrange(-1, index) if index else -1 for index in range(rng.randrange(1, 12))]
            trie.add(Draft(tuple(rng.randrange(6) for _ in parents), tuple(parents), "x", rng.randrange(9)), source)
        order, chances = trie.best_first(63, lambda source, match, depth: (0.9, 0.4, 0.7)[source])
        assert sorted(order) == list(range(len(trie)))
        assert all(one >= other for one, other in itertools.pairwise(chances))
        for size in range(1, len(order) + 1):
            draft = trie.draft(order[:size], "x")  # the constructor checks parents
            paths = [_path(draft, index) for index in range(size)]
            assert len(set(paths)) == size, "no path twice"


def _path(draft: Draft, index: int) -> tuple[int, ...]:
    parent = draft.parents[index]
    return (*(() if parent == ROOT else _path(draft, parent)), draft.token_ids[index])


def test_a_chain_alone_says_what_a_tree_of_it_says():
    rng = random.Random(5)
    for _ in range(200):
        draft = Draft.chain([rng.randrange(3) for _ in range(rng.randrange(1, 12))], "x", rng.randrange(9))
        chain, tree = DraftChain(draft, 2), DraftTrie(3)
        tree.add(draft, 2)
        most, least = rng.randrange(1, 14), rng.choice([0.0, 0.05, 0.3])

        def estimate(source: int, match_length: int, depth: int) -> float:
            return 0.9 - 0.05 * depth - 0.1 * (source == 2) + 0.01 * match_length

        assert len(chain) == len(tree)
        (order, chances), other = (
            chain.best_first(most, estimate, least=least),
            tree.best_first(most, estimate, least=least),
        )
        assert (list(order), chances) == (list(other[0]), other[1])
        assert [list(chain.owners_of(node)) for node in order] == [tree.owners_of(node) for node in order]
        emitted = [rng.randrange(3) for _ in range(rng.randrange(14))]
        assert list(chain.outcomes(emitted)) == list(tree.outcomes(emitted))
        kept = list(range(rng.randrange(len(order) + 1)))
        judged = len(kept) + (len(kept) < len(order) and rng.random() < 0.9)
        parents = draft.parents[: len(order)]
        assert chain.fared(order, parents, kept, judged) == tree.fared(order, parents, kept, judged)
        if order:
            assert chain.draft(order, "x").token_ids == tree.draft(order, "x").token_ids
            assert chain.draft(order, "x").parents == tree.draft(order, "x").parents

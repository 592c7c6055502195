"""The grammar source: drafts what the grammar forces, spelled in tokens the way the target has shown to spell it.

Follows the response from its first byte that can begin the grammar (arming and desync: coli.grammar.matcher) and only
ever proposes, so a wrong, stale or hostile grammar costs rejected drafts, never a byte. At each token: what the
target did at this place before, if that is likely enough; else the forced bytes encoded behind the committed tokens.
Counts are draft tokens after trimming, as the seed counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from coli.drafts.base import MAX_SPAN_TOKENS, Counters, Draft, Guard, NoGuard, Notice, PermanentGuard, SlidingGuard
from coli.grammar.automaton import Automaton
from coli.grammar.habits import END, Habits
from coli.grammar.load import GRAMMAR_TAG, LoadedGrammar, load_grammar
from coli.grammar.matcher import Position, feed_token, walk_token
from coli.grammar.spans import CONTEXT_TOKENS, SpanEncoder, SpanTokenizer, ends_inside_character
from coli.grammar.states import State

LABEL = "grammar"
DEFAULT_DEPTH = 24
SOFT_PROBABILITY = 0.75  # a choice the grammar leaves is drafted from here on
FORCED_PROBABILITY = 0.5  # a spelling of forced bytes is preferred to the tokenizer's from here on
MAX_OVERFLOWS = 16  # states refused as too ambiguous or too deep before the source gives up


class GrammarSource:
    """Drafts from one automaton; the position lives as long as a response."""

    name = "grammar"

    def __init__(
        self,
        automaton: Automaton,
        tokenizer: SpanTokenizer,
        *,
        depth: int = DEFAULT_DEPTH,
        end_id: int | None = None,
        guard: Guard | None = None,
        notice: Notice | None = None,
        encoder: SpanEncoder | None = None,
        habits: Habits | None = None,
    ) -> None:
        """depth: ids per proposal at most (1..48). end_id: proposed where the grammar must end; None: never.

        encoder, habits: of this tokenizer and this automaton, to share what they have learnt; None: new ones.
        """
        if not 1 <= depth <= MAX_SPAN_TOKENS:
            raise ValueError(f"depth {depth}, expected 1..{MAX_SPAN_TOKENS}")
        self.counters = Counters()
        self._automaton = automaton
        self._token_bytes = tokenizer.token_bytes
        self._encoder = encoder if encoder is not None else SpanEncoder(tokenizer)
        self._depth = depth
        self._end_id = end_id
        self._guard = guard if guard is not None else NoGuard()
        self._notice = notice
        self._habits = habits if habits is not None else Habits()
        self._off_line: str | None = None
        self._position: Position = None
        self._context = [END] * CONTEXT_TOKENS

    @property
    def automaton(self) -> Automaton:
        """What the drafts come from."""
        return self._automaton

    def begin(self, prompt_ids: Sequence[int]) -> None:
        if self._position is not None and self._position.can_end:
            self._habits.observe(self._position.site, self._context, END)
        self._position = None
        self._context = [END] * CONTEXT_TOKENS
        self._context = [*self._context, *prompt_ids][-CONTEXT_TOKENS:]

    def commit(self, token_ids: Sequence[int]) -> None:
        self._guard.commit(len(token_ids))
        position, context = self._position, self._context
        for token_id in token_ids:
            if position is not None:
                self._habits.observe(position.site, context, token_id)
            position = feed_token(self._automaton, position, token_id, self._token_bytes(token_id))
            context.append(token_id)
        self._position = position
        del context[:-CONTEXT_TOKENS]

    def propose(self, limit: int, extension: Sequence[int] = ()) -> Draft | None:
        position = self._position
        if position is None and not extension and self._automaton.overflows < MAX_OVERFLOWS:
            return None  # at most steps of a text that is no such thing
        if not self._may_draft():
            return None
        for token_id in extension:
            position = feed_token(self._automaton, position, token_id, self._token_bytes(token_id))
        if position is None:
            return None
        context = [*self._context, *extension]
        num_context = len(context)
        forced_first = position.only_byte is not None
        self._extend(position, context, num_context + min(limit, self._depth))
        self._drop_half_character(context, num_context)
        token_ids = context[num_context:]
        if not token_ids:
            return None
        self.counters.proposed += len(token_ids)
        # The feature for the gate: 2 where the first byte is forced, 1 where it is the target's habit only.
        return Draft.chain(token_ids, self.name, 1 + forced_first)

    def judged(self, judged: int, accepted: int) -> None:
        self.counters.judged += judged
        self.counters.accepted += accepted

    def report_lines(self) -> list[str]:
        counters = self.counters
        lines = self._guard.report_lines()
        if self._off_line is not None:
            lines = [self._off_line, *lines]
        if not counters.proposed:
            return lines
        share = f"({counters.accepted}/{counters.proposed} forced drafts)"
        return [f"{LABEL}: {counters.percent}% acceptance {share}", *lines]

    def _may_draft(self) -> bool:
        if self._off_line is not None or not self._guard.allows(self.counters):
            return False
        if self._automaton.overflows >= MAX_OVERFLOWS:
            self._off_line = f"{LABEL}: too ambiguous or too deep for this text, source switched off"
            if self._notice is not None:
                self._notice(self._off_line)
        return self._off_line is None

    def _extend(self, state: State, context: list[int], longest: int) -> None:
        """Append draft tokens to `context` until it is `longest`, nothing is forced or likely, or the grammar ends."""
        planned: list[int] = []  # the tokenizer's spelling of the forced bytes ahead
        probability = 1.0
        while len(context) < longest:
            forced = state.only_byte is not None
            habit = self._habits.favourite(state.site, context, forced=forced)
            reached: Position = None
            if habit is not None and habit[0] != END:
                token_id, share = habit
                if probability * share >= (FORCED_PROBABILITY if forced else SOFT_PROBABILITY):
                    reached = walk_token(self._automaton, state, token_id, self._token_bytes(token_id))
                if reached is not None:
                    planned = planned[1:] if planned and planned[0] == token_id else []
                    probability *= share
            if reached is None:
                if not planned:
                    planned = self._plan(state, context)
                if not planned:
                    if self._ends_here(state, habit, probability) and self._end_id is not None:
                        context.append(self._end_id)
                    return
                token_id = planned.pop(0)
                reached = walk_token(self._automaton, state, token_id, self._token_bytes(token_id))
                if reached is None:  # refused by the limits of the automaton
                    return
            context.append(token_id)
            state = reached

    def _plan(self, state: State, context: Sequence[int]) -> list[int]:
        """Tokens for what the grammar forces here."""
        data, behind = self._automaton.forced(state)
        if data:
            return list(self._encoder.encode(context, data, behind.byte_set))
        only = self._automaton.only_token(state)
        return [] if only is None else [only]

    def _ends_here(self, state: State, habit: tuple[int, float] | None, probability: float) -> bool:
        """Whether the response is likely to end: it must by the grammar, unless the target went on here before."""
        if habit is None or habit[0] != END:
            return habit is None and state.must_end
        return state.can_end and probability * habit[1] >= (FORCED_PROBABILITY if state.must_end else SOFT_PROBABILITY)

    def _drop_half_character(self, context: list[int], num_context: int) -> None:
        while len(context) > num_context:
            tail = b"".join(map(self._token_bytes, context[-8:]))
            if not ends_inside_character(tail):
                return
            context.pop()


class GrammarLibrary:
    """The grammars of one model, kept between responses as long as their files do not change.

    Automata and habits are shared by the sources it makes, so a later response starts with what an earlier one has
    shown; counters and guards are each source's own.
    """

    def __init__(self, tokenizer: SpanTokenizer, notice: Notice, *, end_id: int | None = None) -> None:
        """end_id: the id that ends a response, proposed where a grammar must end; None: never proposed."""
        self._tokenizer = tokenizer
        self._notice = notice
        self._end_id = end_id
        self._encoder: SpanEncoder | None = None
        self._opened: dict[tuple[Path, str], tuple[object, Automaton, Habits]] = {}

    def open(
        self, path: Path, *, tag: str = GRAMMAR_TAG, depth: int = DEFAULT_DEPTH, gate: str = "seed"
    ) -> GrammarSource:
        """A source for one response from a grammar or schema file. Raises GrammarError.

        Says in a line what of a schema is not used, when it is read. gate: as for `source`.
        """
        version = _version(path)
        known = self._opened.get((path, tag))
        if known is None or version is None or known[0] != version:
            known = self._opened[path, tag] = (version, self._automaton(load_grammar(path, tag)), Habits())
        return self._source(known[1], known[2], depth, gate)

    def source(self, loaded: LoadedGrammar, *, depth: int = DEFAULT_DEPTH, gate: str = "seed") -> GrammarSource:
        """A source for a grammar that came as text, in a request say.

        gate: `seed` guards as the seed does (32 tokens, 50 %, for good), `auto` by a sliding window that re-arms,
        `always` not at all.
        """
        return self._source(self._automaton(loaded), Habits(), depth, gate)

    def _automaton(self, loaded: LoadedGrammar) -> Automaton:
        for line in loaded.notices():
            self._notice(line)
        return loaded.automaton(token_finder(self._tokenizer))

    def _source(self, automaton: Automaton, habits: Habits, depth: int, gate: str) -> GrammarSource:
        if self._encoder is None:
            self._encoder = SpanEncoder(self._tokenizer)
        guards: dict[str, Callable[[str, Notice], Guard]] = {"seed": PermanentGuard, "auto": SlidingGuard}
        return GrammarSource(
            automaton,
            self._tokenizer,
            depth=depth,
            end_id=self._end_id,
            guard=guards[gate](LABEL, self._notice) if gate in guards else None,
            notice=self._notice,
            encoder=self._encoder,
            habits=habits,
        )


def _version(path: Path) -> object:
    """What changes when the file does; None if it cannot be told."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def token_finder(tokenizer: SpanTokenizer) -> Callable[[str], int | None]:
    """Text of a token terminal -> its id: a special token's text, or text the tokenizer makes one token of."""
    special = {tokenizer.token_bytes(token_id): token_id for token_id in tokenizer.special_ids}

    def find(text: str) -> int | None:
        found = special.get(text.encode())
        if found is not None:
            return found
        ids = tokenizer.encode(text)
        return ids[0] if len(ids) == 1 else None

    return find

"""The lazy byte automaton: states are made when first reached, interned, and remember their byte transitions.

A state is a set of threads (pc, count, frame). A frame is a rule being matched with the set of places it returns to;
equal frames are one object, so ambiguity shares stacks instead of copying them, left recursion is a cycle of frames,
and a repetition comes back to the very state it left. Right recursion adds no frame. States and frames are immutable
and may be held by anyone; the tables are emptied when they grow past a bound. One thread only.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from coli.errors import GrammarError
from coli.grammar.program import END, Bump, Bytes, Call, End, Loop, Program, Split, TakeToken
from coli.grammar.states import Frame, Group, State, Thread
from coli.grammar.syntax import TokenTerminal

MAX_THREADS = 20_000  # of one state; more is an overflow: the byte is refused
MAX_STEPS = 200_000  # work for one new state
BURST_STEPS = 400_000  # work in a row for new states, about a quarter of a second; beyond it they are refused
REFILL_STEPS = 500  # given back with each new state; an ordinary one costs 20 to 300
MAX_DEPTH = 10_000  # nested calls
MAX_FORCED = 511  # bytes of one forced span
MAX_HELD = 200_000  # threads, frames and edges held by the tables before they are emptied


class Automaton:
    """All states of one program, made on demand.

    token_id: text of a token terminal -> its id, None if it is not one token. Raises GrammarError if a terminal has no
    id, if the root rule can never begin, or if its beginning alone exceeds the limits.
    """

    def __init__(
        self, program: Program, *, origin: str = "grammar", token_id: Callable[[str], int | None] | None = None
    ) -> None:
        self.program = program
        self.overflows = 0
        self.num_flushes = 0
        self.steps = 0  # work done so far
        self._allowance = BURST_STEPS
        self._terminals = [
            (_terminal_id(terminal, origin, token_id), terminal.negated) for terminal in program.terminals
        ]
        self._byte_sets = [_byte_set_of(instruction) for instruction in program.code]
        self._states: dict[tuple[frozenset[Thread], bool], State] = {}
        self._frames: dict[frozenset[Thread], Frame] = {}
        self._cycles: dict[tuple[int, frozenset[tuple[int, Thread]]], dict[int, Frame]] = {}
        self._held = 0
        self._base = Frame(frozenset(), 0)
        start = self._settle([(program.entry, 0, self._base)])
        if start is None and self.overflows:
            raise GrammarError(f"{origin}: rule 'root' is too deep or too ambiguous to begin; make it simpler")
        if start is None or not (start.byte_set or start.tokens or start.can_end):
            raise GrammarError(f"{origin}: rule 'root' can never match anything; expected a rule with an end")
        self.start = start
        self.idle = bytes(byte for byte in range(256) if not start.byte_set >> byte & 1)  # that cannot begin

    @property
    def num_states(self) -> int:
        """States held by the tables."""
        return len(self._states)

    def step(self, state: State, byte: int) -> State | None:
        """The state after one more byte, None if it is illegal here (or beyond the limits, then `overflows` grows)."""
        try:
            return state.next[byte]
        except KeyError:
            pass
        if not self._afford():
            return self._remember(state, byte, None)
        bit = 1 << byte
        reached: list[Thread] = []
        for byte_set, edges, count, frame in state.groups:
            if byte_set & bit:
                for allowed, target in edges:
                    if allowed & bit:
                        reached.append((target, count, frame))
        return self._remember(state, byte, self._settle(reached) if reached else None)

    def step_token(self, state: State, token_id: int) -> State | None:
        """The state after a token that token terminals take as a whole; None if no terminal takes it here."""
        if not state.tokens:
            return None
        key = 256 + token_id
        try:
            return state.next[key]
        except KeyError:
            pass
        if not self._afford():
            return self._remember(state, key, None)
        reached: list[Thread] = []
        for pc, count, frame in state.tokens:
            terminal, target = self._token(pc)
            wanted, negated = self._terminals[terminal]
            if (wanted == token_id) != negated:
                reached.append((target, count, frame))
        return self._remember(state, key, self._settle(reached) if reached else None)

    def only_token(self, state: State) -> int | None:
        """The id of the one token that must come, None if anything else is legal as well."""
        if state.byte_set or state.can_end or not state.tokens:
            return None
        wanted = {self._terminals[self._token(pc)[0]] for pc, _, _ in state.tokens}
        if len(wanted) != 1:
            return None
        token_id, negated = wanted.pop()
        return None if negated else token_id

    def join(self, one: State, other: State) -> State | None:
        """The state in which either could be: for a token that is legal as a terminal and as its bytes."""
        return self._intern(one.threads | other.threads, one.can_end or other.can_end)

    def forced(self, state: State) -> tuple[bytes, State]:
        """The bytes that must come, at most MAX_FORCED, and the state behind them."""
        if state.forced is None:
            data = bytearray()
            here = state
            while here.only_byte is not None and len(data) < MAX_FORCED:
                reached = self.step(here, here.only_byte)
                if reached is None:
                    break
                data.append(here.only_byte)
                here = reached
            state.forced = (bytes(data), here)
        return state.forced

    def _token(self, pc: int) -> TakeToken:
        instruction = self.program.code[pc]
        assert isinstance(instruction, TakeToken)
        return instruction

    def _afford(self) -> bool:
        """Whether another state may be made now; the mean work per new byte is bounded by REFILL_STEPS."""
        self._allowance = min(self._allowance + REFILL_STEPS, self.steps + BURST_STEPS)
        if self.steps <= self._allowance:
            return True
        self.overflows += 1
        return False

    def _remember(self, state: State, key: int, reached: State | None) -> State | None:
        state.next[key] = reached
        self._held += 1
        if self._held > MAX_HELD:
            self._flush()
        return reached

    def _flush(self) -> None:
        """Forget all states; those in use live on, cut off from the others so that these can be freed."""
        for state in self._states.values():
            state.next.clear()
            state.forced = None
        self._states = {(self.start.threads, self.start.can_end): self.start}
        self._frames = {}
        self._cycles = {}
        self._held = 0
        self.num_flushes += 1

    def _settle(self, pending: list[Thread]) -> State | None:
        """The state of all places reachable from `pending` (changed) without consuming anything."""
        code, nullable = self.program.code, self.program.nullable
        seen: set[Thread] = set()
        threads: list[Thread] = []
        lowest: dict[tuple[int, Frame], int] = {}
        can_end = False
        steps = 0
        while pending:
            thread = pending.pop()
            steps += 1
            if thread in seen:
                continue
            seen.add(thread)
            pc, count, frame = thread
            instruction = code[pc]
            if isinstance(instruction, Bytes):
                if instruction.edges:
                    threads.append(thread)
            elif isinstance(instruction, End):
                if frame is self._base:
                    can_end = True
                pending.extend(frame.returns)
            elif isinstance(instruction, Split):
                pending.extend([(target, count, frame) for target in instruction.targets])
            elif isinstance(instruction, Call):
                threads.append(thread)
                if nullable[instruction.rule]:
                    pending.append((instruction.back, count, frame))
            elif isinstance(instruction, Bump):
                loop = code[instruction.loop]
                assert isinstance(loop, Loop)
                count = count + 1 if loop.high is not None else min(count + 1, loop.low)
                pending.append((instruction.loop, count, frame))
            elif isinstance(instruction, Loop):
                if count >= instruction.low:
                    # A lower count can do all that a higher one can; without this an empty round would count to high.
                    best = lowest.get((pc, frame))
                    if best is not None and best <= count:
                        continue
                    lowest[pc, frame] = count
                    pending.append((instruction.out, 0, frame))
                if instruction.high is None or count < instruction.high:
                    pending.append((instruction.body, count, frame))
            else:
                threads.append(thread)
            if steps > MAX_STEPS:
                self._overflow(steps)
                return None
        self.steps += steps
        if not threads and not can_end:
            return None
        return self._intern(self._pruned(threads), can_end)

    def _overflow(self, steps: int) -> None:
        self.steps += steps
        self.overflows += 1

    def _pruned(self, threads: Iterable[Thread]) -> frozenset[Thread]:
        """Without threads that differ from another one only in a higher count that allows nothing more."""
        thresholds = self.program.thresholds
        kept: list[Thread] = []
        lowest: dict[tuple[int, Frame], int] = {}
        for thread in threads:
            pc, count, frame = thread
            threshold = thresholds[pc]
            if threshold is None or count < threshold:
                kept.append(thread)
            elif lowest.get((pc, frame), count) >= count:
                lowest[pc, frame] = count
        if lowest:
            kept.extend([(pc, count, frame) for (pc, frame), count in lowest.items()])
        return frozenset(kept)

    def _intern(self, threads: frozenset[Thread], can_end: bool) -> State | None:
        key = (threads, can_end)
        state = self._states.get(key)
        if state is not None:
            return state
        self.steps += 6 * len(threads)  # hashing, sorting out, opening: a thread kept costs more than one passed
        if len(threads) > MAX_THREADS:
            self._overflow(len(threads))
            return None
        predicted = self._predict(threads)
        if predicted is None:
            return None
        state = self._states[key] = State(threads, can_end, *predicted)
        self._held += 8 + len(threads) + len(state.groups)
        return state

    def _predict(self, threads: frozenset[Thread]) -> tuple[tuple[Group, ...], tuple[Thread, ...]] | None:
        """What the threads can consume next, rules they call included; None beyond the limits.

        Called rules are opened in an order in which every caller comes first, so that a frame is made once, with all
        its returns. Mutually left-recursive rules are opened together.
        """
        program, base = self.program, self._base
        code, firsts, order, cycles = program.code, program.firsts, program.order, program.cycles
        groups: list[Group] = []
        tokens: list[Thread] = []
        calls: dict[int, set[tuple[int, Thread]]] = {}  # by order
        queue: list[int] = []
        steps = 0

        def call(rule: int, thread: Thread) -> None:
            nonlocal steps
            place = order[rule]
            waiting = calls.get(place)
            if waiting is None:
                waiting = calls[place] = set()
                heapq.heappush(queue, place)
            if thread[0] == END and thread[2] is not base:  # a tail call returns where its caller returns
                waiting.update([(rule, behind) for behind in thread[2].returns])
                steps += len(thread[2].returns)
            else:
                waiting.add((rule, thread))
                steps += 1

        for thread in threads:
            pc, count, frame = thread
            instruction = code[pc]
            if isinstance(instruction, Bytes):
                groups.append((self._byte_sets[pc], instruction.edges, count, frame))
            elif isinstance(instruction, Call):
                call(instruction.rule, (instruction.back, count, frame))
            else:
                tokens.append(thread)
        while queue:
            place = heapq.heappop(queue)
            waiting = calls.pop(place)
            for rule, frame in self._frames_for(waiting):
                first = firsts[rule]
                steps += 1 + len(first.calls)
                if frame.depth > MAX_DEPTH or steps > MAX_STEPS:
                    self._overflow(steps)
                    return None
                if first.edges:
                    groups.append((first.byte_set, first.edges, 0, frame))
                tokens.extend([(pc, 0, frame) for pc in first.tokens])
                cycle = cycles[rule]
                for callee, back in first.calls:
                    if cycle is None or cycles[callee] != cycle:
                        call(callee, (back, 0, frame))
        self.steps += steps
        return tuple(groups), tuple(tokens)

    def _frames_for(self, waiting: set[tuple[int, Thread]]) -> Iterable[tuple[int, Frame]]:
        """(rule, its frame) for all calls of one rule, or of one group of mutually left-recursive rules."""
        rule = next(iter(waiting))[0]
        cycle = self.program.cycles[rule]
        if cycle is None:
            returns = self._pruned([thread for _, thread in waiting])
            frame = self._frames.get(returns)
            if frame is None:
                frame = self._frames[returns] = self._new_frame(returns)
                frame.close()
            return ((rule, frame),)
        by_rule: dict[int, list[Thread]] = {}
        for member, thread in waiting:
            by_rule.setdefault(member, []).append(thread)
        outside = {member: self._pruned(threads) for member, threads in by_rule.items()}
        key = (cycle, frozenset((member, thread) for member, threads in outside.items() for thread in threads))
        frames = self._cycles.get(key)
        if frames is None:
            frames = self._cycles[key] = self._cycle_frames(cycle, outside)
        return frames.items()

    def _cycle_frames(self, cycle: int, outside: dict[int, frozenset[Thread]]) -> dict[int, Frame]:
        depth = 1 + max(frame.depth for threads in outside.values() for _, _, frame in threads)
        members = self.program.members[cycle]
        frames = {rule: Frame(frozenset(), depth) for rule in members}
        inside: dict[int, set[Thread]] = {rule: set(outside.get(rule, ())) for rule in members}
        for caller in members:
            for callee, back in self.program.firsts[caller].calls:
                if callee in inside:
                    inside[callee].add((back, 0, frames[caller]))
        for rule, frame in frames.items():
            frame.returns = frozenset(inside[rule])
            frame.places = hash(frozenset(pc for pc, _, _ in frame.returns))
            self._held += 4 + len(frame.returns)
        for frame in frames.values():
            frame.close()
        return frames

    def _new_frame(self, returns: frozenset[Thread]) -> Frame:
        self._held += 4 + len(returns)
        return Frame(returns, 1 + max(frame.depth for _, _, frame in returns))


def _byte_set_of(instruction: object) -> int:
    byte_set = 0
    if isinstance(instruction, Bytes):
        for allowed, _ in instruction.edges:
            byte_set |= allowed
    return byte_set


def _terminal_id(terminal: TokenTerminal, origin: str, token_id: Callable[[str], int | None] | None) -> int:
    found = terminal.token_id
    if found is None and token_id is not None and terminal.text is not None:
        found = token_id(terminal.text)
    if found is None:
        place = f"{origin}:{terminal.line}:{terminal.column}"
        raise GrammarError(f"{place}: expected one token of the model's vocabulary, found {terminal.text}")
    return found

"""Grammar -> program: instructions for every rule, and what the automaton wants to know about rules beforehand.

Written with a work list, so that nesting costs nothing. A counted repetition inside another becomes a rule of its own,
for only one counter may be live in a rule.
"""

from __future__ import annotations

from typing import NamedTuple

from coli.errors import GrammarError
from coli.grammar.charset import class_edges
from coli.grammar.program import END, Bump, Bytes, Call, End, First, Instruction, Loop, Program, Split, TakeToken
from coli.grammar.syntax import (
    CharClass,
    Choice,
    Grammar,
    Literal,
    Node,
    Reference,
    Repeat,
    Sequence,
    TokenTerminal,
)

MAX_INSTRUCTIONS = 150_000


def compile_grammar(grammar: Grammar) -> Program:
    """Translate a parsed grammar. Raises GrammarError if it needs more than MAX_INSTRUCTIONS."""
    compiler = _Compiler(grammar)
    compiler.emit_rules()
    code = _threaded(compiler.code)
    entry = len(code)
    code.append(Call(compiler.numbers[grammar.root], END))
    rules = range(len(compiler.starts))
    firsts = [_first(code, compiler.nullable_rules, compiler.starts[rule]) for rule in rules]
    order, cycles = _left_call_order([[callee for callee, _ in first.calls] for first in firsts])
    members: list[list[int]] = [[] for _ in order]
    for rule, cycle in enumerate(cycles):
        if cycle is not None:
            members[cycle].append(rule)
    return Program(
        code=code,
        thresholds=[*compiler.thresholds, None],
        names=compiler.names,
        starts=compiler.starts,
        nullable=compiler.nullable_rules,
        firsts=firsts,
        order=order,
        cycles=cycles,
        members=members,
        terminals=compiler.terminals,
        entry=entry,
    )


class _Task(NamedTuple):
    """Write the code of `node` at pc `entry`, to go on at `after`; `threshold` as in Program."""

    node: int
    entry: int
    after: int
    threshold: int | None


class _Compiler:
    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self.numbers = {name: number for number, name in enumerate(grammar.rules)}
        self.names = list(grammar.rules)
        self.code: list[Instruction] = [End()]
        self.thresholds: list[int | None] = [None]
        self.starts: list[int] = []
        self.terminals: list[TokenTerminal] = []
        self._terminal_numbers: dict[TokenTerminal, int] = {}
        self._nullable = _nullable_nodes(grammar)
        bodies = [rule.body for rule in grammar.rules.values()]
        self.nullable_rules = [self._nullable[body] for body in bodies]
        self.starts = [self._reserve(None) for _ in bodies]
        self._tasks = [_Task(body, start, END, None) for body, start in zip(bodies, self.starts, strict=True)]

    def emit_rules(self) -> None:
        while self._tasks:
            self._emit(self._tasks.pop())

    def _reserve(self, threshold: int | None) -> int:
        if len(self.code) >= MAX_INSTRUCTIONS:
            raise GrammarError(
                f"{self._grammar.origin}: grammar compiles to more than {MAX_INSTRUCTIONS} states; shorten its "
                "literals and lists of alternatives"
            )
        self.code.append(End())
        self.thresholds.append(threshold)
        return len(self.code) - 1

    def _add(self, instruction: Instruction, threshold: int | None) -> int:
        pc = self._reserve(threshold)
        self.code[pc] = instruction
        return pc

    def _emit(self, task: _Task) -> None:
        node = self._grammar.nodes[task.node]
        threshold = task.threshold
        if isinstance(node, Literal):
            self.code[task.entry] = self._chain(node.data, task.after, threshold)
        elif isinstance(node, CharClass):
            edges = class_edges(node, task.after, lambda inner: self._add(Bytes(inner), threshold))
            self.code[task.entry] = Bytes(edges)
        elif isinstance(node, Sequence):
            entries = [task.entry, *(self._reserve(threshold) for _ in node.parts[1:]), task.after]
            for part, entry, after in zip(node.parts, entries, entries[1:], strict=False):
                self._tasks.append(_Task(part, entry, after, threshold))
        elif isinstance(node, Choice):
            entries = [self._reserve(threshold) for _ in node.parts]
            self.code[task.entry] = Split(tuple(entries))
            for part, entry in zip(node.parts, entries, strict=True):
                self._tasks.append(_Task(part, entry, task.after, threshold))
        elif isinstance(node, Reference):
            self.code[task.entry] = Call(self.numbers[node.name], task.after)
        elif isinstance(node, TokenTerminal):
            number = self._terminal_numbers.setdefault(node, len(self.terminals))
            if number == len(self.terminals):
                self.terminals.append(node)
            self.code[task.entry] = TakeToken(number, task.after)
        else:
            self._emit_repeat(node, task)

    def _chain(self, data: bytes, after: int, threshold: int | None) -> Instruction:
        if not data:
            return Split((after,))
        for byte in reversed(data[1:]):
            after = self._add(Bytes(((1 << byte, after),)), threshold)
        return Bytes(((1 << data[0], after),))

    def _emit_repeat(self, node: Repeat, task: _Task) -> None:
        low, high = node.low, node.high
        entry, after, threshold = task.entry, task.after, task.threshold
        if self._nullable[node.part]:
            low = 0
        if high == 0:
            self.code[entry] = Split((after,))
        elif (low, high) == (0, 1):
            body = self._reserve(threshold)
            self.code[entry] = Split((body, after))
            self._tasks.append(_Task(node.part, body, after, threshold))
        elif high is None and low == 0:
            body = self._reserve(threshold)
            self.code[entry] = Split((body, after))
            self._tasks.append(_Task(node.part, body, entry, threshold))
        elif high is None and low == 1:
            again = self._add(Split((entry, after)), threshold)
            body = self._reserve(threshold)
            self.code[entry] = Split((body,))
            self._tasks.append(_Task(node.part, body, again, threshold))
        elif (low, high) == (1, 1):
            self._tasks.append(_Task(node.part, entry, after, threshold))
        elif threshold is not None:
            # a second live counter: a rule of its own
            rule = len(self.starts)
            self.names.append(f"{{{node.low},{'' if high is None else high}}}")
            self.starts.append(self._reserve(None))
            self.nullable_rules.append(low == 0)
            self.code[entry] = Call(rule, after)
            self._tasks.append(_Task(task.node, self.starts[rule], END, None))
        else:
            inside = max(low - 1, 0)
            bump = self._add(Bump(entry), inside)
            body = self._reserve(inside)
            self.code[entry] = Loop(low, high, body, after)
            self._tasks.append(_Task(node.part, body, bump, inside))


def _nullable_nodes(grammar: Grammar) -> list[bool]:
    """For each node whether it can match nothing; a least fixpoint by counting what is still missing."""
    nodes = grammar.nodes
    nullable = [False] * len(nodes)
    missing = [1] * len(nodes)
    users: list[list[int]] = [[] for _ in nodes]
    ready: list[int] = []
    references: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        if isinstance(node, Sequence | Choice):
            if isinstance(node, Sequence):
                missing[index] = len(node.parts)
            for part in node.parts:
                users[part].append(index)
        elif isinstance(node, Repeat):
            users[node.part].append(index)
        elif isinstance(node, Reference):
            references.setdefault(node.name, []).append(index)
        if _is_empty_match(node):
            ready.append(index)
            missing[index] = 0
    for rule in grammar.rules.values():
        users[rule.body].extend(references.get(rule.name, ()))
    while ready:
        index = ready.pop()
        if nullable[index]:
            continue
        nullable[index] = True
        for user in users[index]:
            missing[user] -= 1
            if missing[user] <= 0 and not nullable[user]:
                ready.append(user)
    return nullable


def _is_empty_match(node: Node) -> bool:
    return (isinstance(node, Literal) and not node.data) or (isinstance(node, Repeat) and node.low == 0)


def _threaded(code: list[Instruction]) -> list[Instruction]:
    """The same code with every target moved past jumps (splits with a single target)."""
    final = list(range(len(code)))
    for pc in range(len(code)):
        path = []
        here = pc
        while final[here] == here:
            instruction = code[here]
            if not isinstance(instruction, Split) or len(instruction.targets) != 1:
                break
            path.append(here)
            here = instruction.targets[0]
        for passed in path:
            final[passed] = final[here]
    threaded: list[Instruction] = []
    for instruction in code:
        if isinstance(instruction, Bytes):
            instruction = Bytes(tuple((byte_set, final[target]) for byte_set, target in instruction.edges))
        elif isinstance(instruction, Split):
            instruction = Split(tuple(dict.fromkeys(final[target] for target in instruction.targets)))
        elif isinstance(instruction, Call):
            instruction = Call(instruction.rule, final[instruction.back])
        elif isinstance(instruction, Loop):
            instruction = Loop(instruction.low, instruction.high, final[instruction.body], final[instruction.out])
        elif isinstance(instruction, TakeToken):
            instruction = TakeToken(instruction.terminal, final[instruction.target])
        threaded.append(instruction)
    return threaded


def _first(code: list[Instruction], nullable: list[bool], start: int) -> First:
    edges: list[tuple[int, int]] = []
    calls: list[tuple[int, int]] = []
    tokens: list[int] = []
    byte_set = 0
    seen = {start}
    pending = [start]
    while pending:
        here = pending.pop()
        instruction = code[here]
        reached: tuple[int, ...] = ()
        if isinstance(instruction, Bytes):
            edges.extend(instruction.edges)
            for allowed, _ in instruction.edges:
                byte_set |= allowed
        elif isinstance(instruction, Split):
            reached = instruction.targets
        elif isinstance(instruction, Call):
            calls.append(instruction)
            if nullable[instruction.rule]:
                reached = (instruction.back,)
        elif isinstance(instruction, Loop):
            reached = (instruction.body, instruction.out) if instruction.low == 0 else (instruction.body,)
        elif isinstance(instruction, TakeToken):
            tokens.append(here)
        # End: the rule is nullable. Bump: the body is empty, so low is 0 and the way out is on the list already.
        for pc in reached:
            if pc not in seen:
                seen.add(pc)
                pending.append(pc)
    return First(byte_set, tuple(edges), tuple(dict.fromkeys(calls)), tuple(tokens))


def _left_call_order(callees: list[list[int]]) -> tuple[list[int], list[int | None]]:
    """(order, cycles) as in Program: Tarjan's strongly connected components of the left calls, without recursion."""
    num_rules = len(callees)
    index: list[int] = [-1] * num_rules
    low = [0] * num_rules
    on_stack = [False] * num_rules
    stack: list[int] = []
    component = [0] * num_rules
    cycles: list[int | None] = [None] * num_rules
    num_components = 0
    counter = 0
    for origin in range(num_rules):
        if index[origin] >= 0:
            continue
        path = [(origin, callees[origin], 0)]
        while path:
            rule, below, position = path.pop()
            if position == 0:
                index[rule] = low[rule] = counter
                counter += 1
                stack.append(rule)
                on_stack[rule] = True
            else:
                low[rule] = min(low[rule], low[below[position - 1]])
            while position < len(below):
                callee = below[position]
                position += 1
                if index[callee] < 0:
                    path.append((rule, below, position))
                    path.append((callee, callees[callee], 0))
                    break
                if on_stack[callee]:
                    low[rule] = min(low[rule], index[callee])
            else:
                if low[rule] == index[rule]:
                    recursive = stack[-1] != rule or rule in below
                    member = -1
                    while member != rule:
                        member = stack.pop()
                        on_stack[member] = False
                        component[member] = num_components
                        cycles[member] = num_components if recursive else None
                    num_components += 1
    return [num_components - 1 - number for number in component], cycles

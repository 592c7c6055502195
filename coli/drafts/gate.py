"""The gate: how many of the likeliest draft tokens are worth a forward. Zero is a normal answer.

Weighs expected tokens against measured costs, in plain forwards. Whatever it decides, the output is the same: it can
only waste time, and how much of it is bounded by an account. Losses against plain decoding are paid from the account,
which earns a small share of the time spent; an empty account closes the gate. Pure: it is told seconds and bytes and
reads no clock, so a simulated machine can drive it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from coli.drafts.costs import MAX_ROWS, RowCosts

# Draft tokens of one forward. Every new number of rows has to be prepared for once, so that large ones are few. With
# the newest id 12 and 16 rows fill the kernels' blocks; where experts stream, reads outweigh that.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 11, 15, 24, 32, 48, 63)
STREAMED_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 24, 32, 48, 63)
FEW_SIZES = (3, 8, 16, 32)  # where that takes long
DEAR_PREPARATION = 4.0  # plain forwards
# A dear one must be earned back: that many forwards are thought to follow, in each of which something is right as often
# as it was so far (and in those before, in which nothing was), and spares so many plain forwards
FOLLOWING, BEFORE, SPARED = 250, 30, 0.7

OPENING_GAIN = 1.08  # expected tokens per plain forward's time from which drafting begins
CLOSING_GAIN = 1.02  # and below which it ends
EARNED = 0.008  # share of the time spent that may be lost
FIRST_ALLOWANCE = 2.5  # plain forwards that may be lost at the start
FIRST_PREPARATIONS = 5.0  # plain forwards that preparing for new row counts may take at the start, but for the last
EARNED_FOR_PREPARING = 0.002  # and more with each forward
LARGEST_ALLOWANCE = 8.0
LARGEST_DEBT = 1.0
REOPEN_AT = 0.5  # plain forwards on the account at which a closed gate opens
PLAIN_EVERY = 64  # drafted forwards in a row after which a plain one is measured
PROBE_EVERY = 4  # forwards between two probes of a row count that might be cheaper than thought
RETRY_AFTER = 64  # declined proposals worth a look after which a small one is tried; doubled at each failure
RETRY_AT_MOST = 1024
PROMISING = 1.3  # expected tokens of a forward with one draft that are worth such a try
STRONG_GAIN = 1.2  # gain of declined drafts that makes a closed gate open sooner
REOPENING = 0.3  # plain forwards such a proposal counts, halved with each closing
MOST_CLOSINGS = 8
RESERVE = 0.5  # plain forwards on the account that probes leave alone
HICCUP = 2.0  # times the usual cost that a drafted forward is charged at most
MOST_FOR_PREPARING = 16.0  # plain forwards; a first forward that takes longer was held up by something else
PREPARED_FOR = 8  # forwards of a new row count among which preparing for it is divided
DOUBTFUL = 0.25  # weight of a first forward, from which the preparation was only estimated away
SHORTEST_REACH = 4  # draft tokens asked for at least; at most twice what was accepted lately
REACH_KEPT = 0.9


class SharedForward(Protocol):
    """A forward that several responses shared (coli.engine.together)."""

    @property
    def responses(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def committed(self) -> int: ...
    @property
    def seconds(self) -> float: ...


@dataclass(slots=True)
class GateCounts:
    """What the gate decided in one response."""

    plain: int = 0  # forwards without a proposal
    drafted: int = 0
    declined: int = 0  # forwards whose proposals did not pay
    probes: int = 0  # drafted to learn a cost
    refreshes: int = 0  # plain though drafting paid, to measure a plain forward
    closed: int = 0  # times the account ran empty
    lost: float = 0.0  # seconds of drafted forwards that plain decoding would not have spent
    gained: float = 0.0  # seconds it would have spent more
    bytes_saved: int = 0  # expert bytes likewise
    bytes_wasted: int = 0

    def add_share(self, other: GateCounts, responses: int) -> None:
        """What a forward shared by so many came to."""
        self.closed += other.closed
        self.lost += other.lost / responses
        self.gained += other.gained / responses
        self.bytes_saved += round(other.bytes_saved / responses)
        self.bytes_wasted += round(other.bytes_wasted / responses)


@dataclass(slots=True)
class Served:
    """What the gate keeps of one response, while others may begin and end."""

    counts: GateCounts = field(default_factory=GateCounts)
    prepared: set[int] = field(default_factory=set)  # row counts it has run
    steps: int = 0
    proofs: int = 0
    together: dict[int, Served] = field(default_factory=dict)  # in forwards shared by so many


class Gate:
    """Decides for one response after another, or several by turns; costs may be shared and remembered.

    Responses that decode together have a gate of their own per number of responses (`among`). There a plain forward is
    one of a row for each, `rows` is 1 and the drafts of all, and a right draft is worth less: it spares one of them a
    forward that the others need all the same.
    """

    def __init__(self, costs: RowCosts | None = None, responses: int = 1) -> None:
        self.costs = costs if costs is not None else RowCosts()
        self._served = Served()
        self._responses = responses
        self._among: dict[int, Gate] = {}
        self._last_shared: SharedForward | None = None
        self._last_counts = GateCounts()  # what it came to
        self._account = FIRST_ALLOWANCE
        self._for_preparing = FIRST_PREPARATIONS
        self._is_closed = False
        self._is_drafting = False
        self._since_plain = 0
        self._since_probe = PROBE_EVERY
        self._since_retry = 0
        self._retry_after = RETRY_AFTER
        self._reach = float(SHORTEST_REACH)
        self._preparing_s = 0.0  # mean seconds that the first forward of a row count took more than later ones
        self._preparations = 0
        self._first_plain_s = 0.0
        self._closings = 0  # since the account was last full

    def begin(self) -> Served:
        """A new response: a forward of each row count has to be prepared for again."""
        self._served = Served()
        return self._served

    def among(self, responses: int) -> Gate:
        """The gate for forwards that so many responses share."""
        if responses == self._responses:
            return self
        if responses not in self._among:
            self._among[responses] = Gate(RowCosts(self.costs.cycle_bytes), responses)
        return self._among[responses]

    def serving(self, served: Served, responses: int = 1) -> Gate:
        """The gate for forwards that so many responses share, about to decide for one of them."""
        gate = self.among(responses)
        if gate is not self:
            if responses not in served.together:
                served.together[responses] = Served(prepared=gate._served.prepared)  # sessions of one shape
            served = served.together[responses]
        gate._served = served
        return gate

    @property
    def counts(self) -> GateCounts:
        """Of the response it was last about to decide for."""
        return self._served.counts

    @property
    def is_closed(self) -> bool:
        """Whether losses have used up the account."""
        return self._is_closed

    @property
    def seconds_gained(self) -> float:
        """Seconds this response's drafts have spared it, losses taken off."""
        return self.counts.gained - self.counts.lost

    def proved(self) -> None:
        """What a source said about the next id was right, drafted or not."""
        self._served.proofs += 1

    def depth_limit(self, limit: int) -> int:
        """Draft tokens worth asking for: what could pay if all were right, and not far beyond what lately was right."""
        return min(limit, int(self._reach) if self.costs.plain_seconds else 1)

    def choose(self, chances: Sequence[float]) -> int:
        """How many nodes to draft. chances: path probabilities, likeliest first, each the sum's next term."""
        self._served.steps += 1
        if not chances:
            self.counts.plain += 1
            return 0
        if self._responses > 1:
            chances = [chance / self._responses for chance in chances]
        size = self._chosen(chances)
        if size:
            self.counts.drafted += 1
        else:
            self.counts.declined += 1
        return size

    def _chosen(self, chances: Sequence[float]) -> int:
        costs = self.costs
        self._since_probe += 1
        if not costs.plain_seconds:
            return 0
        if self._is_closed:
            self._reconsider(chances)
            return 0
        if self._since_plain >= PLAIN_EVERY:
            self.counts.refreshes += 1
            return 0
        best, best_size, hope, hope_size = 0.0, 0, 0.0, 0
        tokens, taken = 1.0, 0
        share = self._preparation() / PREPARED_FOR
        # what others draft beside it decides which row count is met: no use to probe below the largest
        probed = costs.most_rows if self._responses > 1 else 0
        for size in self._sizes(len(chances)):
            while taken < size:
                tokens += chances[taken]
                taken += 1
            preparing = 0.0 if size + 1 in self._served.prepared else share
            gain = tokens / (costs.ratio(size + 1) + preparing)
            if gain > best:
                best, best_size = gain, size
            if size < probed:
                continue
            gain = tokens / costs.lowest(size + 1)
            if gain > hope and costs.highest(size + 1) - tokens <= self._account - RESERVE:
                hope, hope_size = gain, size
        wanted = CLOSING_GAIN if self._is_drafting else OPENING_GAIN
        if hope >= max(best, 1.0) * OPENING_GAIN and self._since_probe >= PROBE_EVERY:
            self._since_probe = 0
            self.counts.probes += 1
            return hope_size
        if best >= wanted and not costs.is_known(best_size + 1) and best_size >= probed:
            best_size = self._measured_size(chances, wanted)
        self._is_drafting = best >= wanted and best_size > 0
        if self._is_drafting:
            self._since_retry, self._retry_after = 0, RETRY_AFTER
            return best_size
        return self._retried(1 + chances[0])

    def _sizes(self, count: int) -> list[int]:
        """Sizes to weigh for `count` nodes: the steps, and all of them where that row count is prepared already.

        What is not prepared and cannot be afforded or earned back is left out.
        """
        known = self._served.prepared
        dear = self._preparation() > DEAR_PREPARATION
        affordable = self._for_preparing > 0 and self._may_prepare
        sizes, steps = [], STREAMED_SIZES if self.costs.streams else SIZES
        for size in steps:
            if size > count:
                break
            if size + 1 in known or (affordable and (not dear or size in FEW_SIZES)):
                sizes.append(size)
        return [*sizes, count] if count not in steps and count + 1 in known else sizes

    @property
    def _may_prepare(self) -> bool:
        preparation = self._preparation()
        if preparation <= DEAR_PREPARATION:
            return True
        return self._served.proofs * SPARED * FOLLOWING >= preparation * (self._served.steps + BEFORE)

    def _price(self, rows: int) -> float:
        """Plain forwards `rows` rows cost, with a share of the preparation if this response has not run them yet."""
        ratio = self.costs.ratio(rows)
        if rows not in self._served.prepared:
            ratio += self._preparation() / PREPARED_FOR
        return ratio

    def _preparation(self) -> float:
        """Plain forwards' time that the first forward of a row count takes more than later ones."""
        return min(self._preparing_s / self.costs.plain_seconds, MOST_FOR_PREPARING)

    def _note_preparation(self, seconds: float) -> None:
        self._preparations = min(self._preparations + 1, 4)
        self._preparing_s += (max(seconds, 0.0) - self._preparing_s) / self._preparations

    def _measured_size(self, chances: Sequence[float], wanted: float) -> int:
        best, best_size, tokens = wanted, 0, 1.0
        for size, chance in enumerate(chances, start=1):
            tokens += chance
            if size < MAX_ROWS and self.costs.is_known(size + 1) and tokens / self._price(size + 1) >= best:
                best, best_size = tokens / self._price(size + 1), size
        self._is_drafting = best_size > 0
        return best_size

    def _reconsider(self, chances: Sequence[float]) -> None:
        """A closed gate opens sooner where what is declined would pay well, later each time that proved wrong."""
        best, tokens = 0.0, 1.0
        for size, chance in enumerate(chances, start=1):
            tokens += chance
            best = max(best, tokens / self._price(size + 1))
        if best >= STRONG_GAIN:
            self._settle(REOPENING / 2**self._closings)

    def _retried(self, tokens: float) -> int:
        """After many declined proposals of some promise one token is tried again: costs may have changed."""
        if tokens < PROMISING:
            return 0
        self._since_retry += 1
        if self._since_retry < self._retry_after or self.costs.highest(2) - tokens > self._account:
            return 0
        if 2 not in self._served.prepared and not self._may_prepare:
            return 0
        self._since_retry = 0
        self._retry_after = min(2 * self._retry_after, RETRY_AT_MOST)
        self.counts.probes += 1
        return 1

    def measured_shared(self, forward: SharedForward, expert_bytes: int) -> None:
        """A forward of several responses: each of them tells and has its share of the gain, costs count it once."""
        served = self._served
        if forward is not self._last_shared:
            self._last_shared, self._served = forward, Served(prepared=served.prepared)
            drafted = forward.rows - forward.responses
            self.measured(1 + drafted, forward.committed / forward.responses, forward.seconds, expert_bytes)
            self._last_counts, self._served = self.counts, served
        served.counts.add_share(self._last_counts, forward.responses)

    def measured(self, rows: int, committed: float, seconds: float, expert_bytes: int) -> None:
        """The forward behind the last `choose`: `rows` rows gave `committed` tokens in `seconds`."""
        costs, first = self.costs, rows not in self._served.prepared
        self._served.prepared.add(rows)
        # the first of its kind includes preparing for it: not what the next one will cost
        if not first:
            costs.add(rows, seconds, expert_bytes)
        elif rows == 1:
            self._first_plain_s = seconds
        elif not costs.is_known(rows) and costs.plain_seconds:
            plain = costs.plain_seconds
            likely = min(max(seconds - self._preparation() * plain, plain), costs.highest(rows) * plain)
            costs.add(rows, likely, expert_bytes, weight=DOUBTFUL)
        plain = costs.plain_seconds
        if rows == 1 and not first and self._first_plain_s and not self._preparations:
            self._note_preparation(self._first_plain_s - seconds)
        if rows == 1:
            self._since_plain = 0
            self._settle(EARNED)
            return
        self._since_plain += 1
        self._reach = min(max(self._reach * REACH_KEPT, 2.0 * committed, SHORTEST_REACH), MAX_ROWS - 1)
        if not plain:
            return
        before = committed * costs.expert_bytes(1)
        if before >= expert_bytes:
            self.counts.bytes_saved += round(before - expert_bytes)
        else:
            self.counts.bytes_wasted += round(expert_bytes - before)
        loss = seconds - committed * plain
        if loss > 0:
            self.counts.lost += loss
        else:
            self.counts.gained -= loss
        ratio = seconds / plain
        if first:
            self._note_preparation(seconds - costs.ratio(rows) * plain)
            prepared = min(self._preparation(), max(ratio - 1, 0.0))
            self._for_preparing -= prepared
            ratio -= prepared
        # a hiccup of the machine is not the draft's fault: it counts twice the usual, or a forward for each row
        ratio = min(ratio, rows, HICCUP * costs.ratio(rows))
        self._settle(EARNED * ratio - (ratio - committed))

    def _settle(self, change: float) -> None:
        """Book plain forwards gained or lost; what the account cannot hold pays for preparations."""
        surplus = max(self._account + change - LARGEST_ALLOWANCE, 0.0)
        self._for_preparing = min(self._for_preparing + EARNED_FOR_PREPARING + surplus, LARGEST_ALLOWANCE)
        self._account = min(max(self._account + change, -LARGEST_DEBT), LARGEST_ALLOWANCE)
        if self._account <= 0 and not self._is_closed:
            self._is_closed = True
            self._is_drafting = False
            self._closings = min(self._closings + 1, MOST_CLOSINGS)
            self.counts.closed += 1
        elif self._is_closed and self._account >= REOPEN_AT:
            self._is_closed = False
        if self._account == LARGEST_ALLOWANCE:
            self._closings = 0

    def report(self) -> dict[str, Any]:
        """JSON-ready: decisions in the response last served, costs and the account."""
        counts = asdict(self.counts)
        for name in ("lost", "gained"):
            counts[f"seconds_{name}"] = round(counts.pop(name), 6)
        counts["declined_forwards"] = counts.pop("declined")
        found = {**counts, "allowance_plain_forwards": round(self._account, 3), "costs": self.costs.table()}
        served = self._served
        shared = {str(count): self.serving(served, count).report() for count in sorted(served.together)}
        return {**found, "together": shared} if shared else found


def gate_lines(report: Mapping[str, Any]) -> list[str]:
    """The report's object (Gate.report and what TreeSources adds) as lines for people; none if nothing was proposed."""
    if not (report["drafted"] or report["declined_forwards"]):
        return []
    declined = ", ".join(f"{name} {count}" for name, count in report["declined"].items()) or "none"
    lines = [
        f"gate: {report['drafted']} forwards drafted, {report['declined_forwards']} declined, "
        f"{report['probes']} probes, {report['refreshes']} refreshes, closed {report['closed']}x; "
        f"{report['seconds_gained']:.2f} s gained, {report['seconds_lost']:.2f} s lost",
        f"gate: tokens declined: {declined}; drafting took {1000 * report['drafting_s']:.0f} ms",
    ]
    if depths := report["accepted_depth"]:
        lines.append("gate: accepted per drafted forward: " + ", ".join(f"{d}: {n}x" for d, n in depths.items()))
    if len(report["costs"]) > 1:
        costs = (f"{c['rows']}: {c['plain_forwards']:.2f}" for c in report["costs"])
        lines.append(f"gate: cost of rows in plain forwards: {', '.join(costs)}")
    if report["bytes_saved"] or report["bytes_wasted"]:
        saved, wasted = report["bytes_saved"] / 1e6, report["bytes_wasted"] / 1e6
        lines.append(f"gate: expert bytes saved {saved:.1f} MB, wasted {wasted:.1f} MB")
    return lines

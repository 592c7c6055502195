"""How many threads compute a layer's experts while others are being read.

Reads take processor time as well: the reader threads' and, on a virtual machine, that of the disk's thread on the host,
which shares this machine's processors. Where reads decide how long a layer takes, half the threads are done as early,
and the reads sooner. Changes no bit. Owned by the transformer, one of them per number of rows.
"""

from dataclasses import dataclass

_WEIGHT = 0.125  # of one more measurement in the mean
_WORTH_S = 0.005  # of reading: on a busy machine one thread of few gets little, which short reads would not pay back


@dataclass(slots=True)
class ExpertPace:
    """Seconds one expert takes on all threads with no read under way; 0: not known yet."""

    expert_s: float = 0.0

    def threads(self, most: int, experts: int, reading_left_s: float) -> int:
        """Threads of `most` for the next of `experts` that are not computed yet.

        Parts are cut when a tape is recorded, so fewer threads than `most` take at least twice as long. The expert that
        arrives last is computed behind the reads in any case.
        """
        if reading_left_s >= _WORTH_S and self.expert_s and 2 * self.expert_s * (experts - 1) <= reading_left_s:
            return (most + 1) // 2
        return most

    def learn(self, experts: int, seconds: float) -> None:
        """`experts` took so long on all threads, with no read under way."""
        each = seconds / experts
        self.expert_s += (each - self.expert_s) * (_WEIGHT if self.expert_s else 1.0)

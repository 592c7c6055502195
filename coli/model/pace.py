"""How many threads compute a layer's experts while others are being read.

Reads take processor time as well: the reader threads' and, on a virtual machine, that of the disk's thread on the host,
which shares this machine's processors. Where reads decide how long a layer takes, half the threads are done as early,
and the reads sooner. Changes no bit. Owned by the transformer, one of them per number of rows.
"""

from dataclasses import dataclass

_WEIGHT = 0.25  # of one more measurement in the mean
_WORTH_S = 0.005  # of reading: on a busy machine one thread of few gets little, which short reads would not pay back
# Half the threads take 1.4 times as long where memory is the limit, and twice where processors are or others want those
# too: then each thread is worth its share. Forgotten slowly, so that it is tried again.
_DEAR, _FORGIVEN = 1.7, 0.998


@dataclass(slots=True)
class ExpertPace:
    """Seconds one expert takes: on all threads with no read under way, and on half of them; 0: not known yet."""

    expert_s: float = 0.0
    halved_s: float = 0.0

    def threads(self, most: int, experts: int, reading_left_s: float) -> int:
        """Threads of `most` for the next of `experts` that are not computed yet.

        The expert that arrives last is computed behind the reads in any case.
        """
        if reading_left_s < _WORTH_S or not self.expert_s:
            return most
        if self.halved_s > _DEAR * self.expert_s:
            self.halved_s *= _FORGIVEN
            return most
        halved_s = self.halved_s or 2 * self.expert_s  # the same parts on half the threads take no longer than that
        return (most + 1) // 2 if halved_s * (experts - 1) <= reading_left_s else most

    def learn(self, experts: int, seconds: float, *, halved: bool) -> None:
        """`experts` took so long, on half the threads or on all with no read under way."""
        if halved:
            self.halved_s = _mean(self.halved_s, seconds / experts)
        else:
            self.expert_s = _mean(self.expert_s, seconds / experts)


def _mean(before: float, now: float) -> float:
    return before + (now - before) * (_WEIGHT if before else 1.0)

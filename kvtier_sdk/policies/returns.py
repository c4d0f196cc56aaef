"""The default eviction policy, which learns how likely chunks of each age are to be reused."""

from __future__ import annotations

from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import groupby, islice
from math import exp, inf, log2
from operator import attrgetter, itemgetter

from kvtier_sdk.contract import EvictionPolicy
from kvtier_sdk.errors import KVTierError
from kvtier_sdk.types import OffloadKey, RequestContext

# Ages, in seconds, fall into buckets of half an octave. The last bucket begins at 8 days.
_BUCKETS = 40
_BEGINS = (0.0, *(2 ** (number / 2) for number in range(1, _BUCKETS)))
_WIDTHS = tuple(2 ** ((number + 1) / 2) - _BEGINS[number] for number in range(_BUCKETS))
_ENDS = (*_BEGINS[1:], inf)
_CLASSES = (1, 2, 3, 4, 6, 8, 12, 16)  # the fewest uses in each class; more than 16 count as 16
_MOST_USES = _CLASSES[-1]
_CLASS_OF = tuple(sum(uses >= least for least in _CLASSES) - 1 for uses in range(_MOST_USES + 1))
_GHOSTS = 6  # the most evicted chunks to remember, per slot; the policy uses 1 to 2 KB per slot
# Each bucket begins with this many assumed returns. The number is small, so that chunks of an age
# without any actual return are evicted first.
_ASSUMED = 0.1
# A turn's pace is log4 of the wait before it in seconds, limited to _SLOWEST (17 minutes).
_UNKNOWN, _SLOWEST = -1, 5
# A pace's rates are averaged with the rates over all paces, which weigh as much as this many turns.
# So the policy loses few hits if the pace predicts nothing.
_TRUST = 15
# To save time, groups move out of a bucket only at intervals of _LATE times the bucket's width.
_LATE = 1 / 8
_NEWS = 1 / 16  # rates are recomputed once new events exceed this fraction of earlier events
# After every _TURNS requests, all earlier events lose a hundredth of their weight.
_TURNS = 64
_MEMORY = 0.99
# An eviction order expires after _ORDER_S, or once the fraction _ORDERED of the slots is evicted.
_ORDER_S = 1.0
_ORDERED = 1 / 64
# Labels of chunks left behind by their conversation, and of ended conversations.
_REST, _ENDED = "left behind", "ended"
_MOST_BEHIND = 16  # the most groups to remember as dependent on a group's chunks


class ReturnsPolicy(EvictionPolicy):
    """Evicts the chunks with the lowest expected rate of reuse.

    The chunks whose last user was the same request form a turn. A later request, usually the next
    turn of the conversation, reuses either most of these chunks or none. The policy learns how
    often turns of each age are reused. A chunk's worth is its highest expected rate of reuse over
    any further wait: the index of J. C. Gittins, "Bandit processes and dynamic allocation indices",
    1979.

    Each ``stop``, the reason why an answer ended, has separate rates. Rates also depend on the wait
    before a turn, because a conversation that returned quickly tends to do so again. They depend on
    a chunk's number of uses too, because in some workloads this number matters more than the age.

    If a request predicts the wait until the next turn (``resume_in_s``), the octave of this wait
    replaces the ``stop``. So the policy learns how reliable the predictions are.
    """

    def __init__(self) -> None:
        self._slots = self._most_ghosts = 0
        self._finished = 0
        # The groups of the chunks in the pool, and of the remembered evicted chunks.
        self._groups: dict[OffloadKey, _Group] = {}
        self._ghosts: dict[OffloadKey, _Group] = {}
        self._evicted: deque[_Group] = deque()  # groups without chunks in the pool, oldest first
        self._turns: defaultdict[str, _Turn] = defaultdict(_Turn)  # of the running requests
        self._kinds: dict[tuple[str, int, int], _Kind] = {}
        # The groups that wait for a return, by bucket and kind, oldest first. ``_gone`` has the
        # groups without chunks in the pool, so that searches for victims skip them.
        self._waiting = _cells()
        self._gone = _cells()
        # The worth, kind and bucket of each cell of ``_waiting``, least worth first.
        self._ranked: list[tuple[float, _Kind, int]] = []
        self._moved_s = [-inf] * _BUCKETS
        self._rates: dict[tuple[str, int, int], _Rates] = {}  # by label, class of uses and pace
        self._order: deque[_Group] = deque()
        self._ordered_s = self._grown_s = -inf
        self._chosen = 0  # victims since the groups were put in order

    def open(self, slots: int) -> None:
        self._slots = slots
        self._most_ghosts = _GHOSTS * slots

    def on_insert(self, keys: Sequence[OffloadKey], request: RequestContext) -> None:
        if not self._slots:
            raise KVTierError(
                "policy returns: open() was not called, so it does not know the capacity"
            )
        turn = self._turns[request.request_id]
        ghosts = self._ghosts
        if ghosts.keys().isdisjoint(keys):
            self._store(turn.group(1), keys)
            return
        before: dict[_Group | None, list[OffloadKey]] = {None: []}
        for key in keys:
            before.setdefault(ghosts.pop(key, None), []).append(key)
        for ghost, run in before.items():
            if ghost is None:
                self._store(turn.group(1), run)
                continue
            self._note_return(ghost, len(run), turn)
            ghost.release_if_over()
            self._store(turn.group(ghost.uses + 1), run)

    def on_access(self, keys: Sequence[OffloadKey], request: RequestContext) -> None:
        turn = self._turns[request.request_id]
        before: dict[_Group, list[OffloadKey]] = {}
        groups = self._groups
        for now, of_group in groupby(keys, groups.__getitem__):
            before.setdefault(now, []).extend(of_group)
        moved: list[tuple[_Group, _Group]] = []
        for now, run in before.items():
            if now.turn is turn:
                # Chunks are loaded in any order, so take the prefix order from their use.
                now.used += run
                continue
            now.present -= len(run)
            self._note_return(now, len(run), turn)
            group = turn.group(now.uses + 1)
            group.used += run
            self._take(group, run)
            if now.left and not now.present:
                self._evicted.append(now)
            moved.append((now, group))
        old, rest = turn, []
        for now, group in moved:
            if now.turn is not old:
                old = now.turn
                rest = [other for other in old.groups.values() if other.present]
            if rest or now.behind:
                # Evict the old turn's other chunks first, because they need the used chunks.
                needing = [of for of in now.behind if of.present and of.turn is not turn]
                group.behind += needing + rest
                del group.behind[:-_MOST_BEHIND]
        for now, _ in moved:
            now.release_if_over()

    def _store(self, group: _Group, keys: Sequence[OffloadKey]) -> None:
        group.keys += keys
        self._take(group, keys)

    def _take(self, group: _Group, keys: Sequence[OffloadKey]) -> None:
        group.present += len(keys)
        group.left += len(keys)
        self._groups.update(dict.fromkeys(keys, group))

    def on_remove(self, key: OffloadKey) -> None:
        group = self._groups.pop(key)
        group.present -= 1
        ghosts = self._ghosts
        if len(ghosts) >= self._most_ghosts:
            while self._evicted and len(ghosts) >= self._most_ghosts:
                self._forget(self._evicted.popleft())
        if len(ghosts) < self._most_ghosts:
            ghosts[key] = group
        else:
            group.left -= 1
        if not group.present:
            self._evicted.append(group)

    def on_request_finished(self, request: RequestContext, stop: str | None) -> None:
        turn = self._turns.pop(request.request_id, None)
        if turn is not None:
            self._end_turn(turn, request.resume_in_s, stop or "")
        self._finished += 1
        if self._finished % _TURNS == 0:
            self._grow_older()
            for rates in self._rates.values():
                rates.fade()

    def _end_turn(self, turn: _Turn, resume_in_s: float | None, label: str) -> None:
        # Judge returns only at the end of the turn, because a tier may load the chunks in parts.
        for group, returned in turn.returned.items():
            kind = group.kind
            if kind is not None and kind.label != _REST and returned > group.left > 0:
                # Most of the group returned, so the conversation left the other chunks behind.
                self._begin_wait(group, _REST, kind.classes)
        turn.returned.clear()
        if resume_in_s == inf:
            label = _ENDED
        elif resume_in_s is not None:
            label = f"in 2^{round(log2(max(resume_in_s, 0.01)))} s"
            turn.pace = _UNKNOWN
        classes = chunks = 0
        waiting = []
        for _, group in sorted(turn.groups.items(), reverse=True):
            if group.left:
                chunks += group.left
                classes |= 1 << _CLASS_OF[group.uses]
                waiting.append((group, classes))
        if waiting:
            turn.end = waiting[-1][0]
        # Begin with the least used group. It has the prefix's end, which must be evicted first.
        for group, classes in reversed(waiting):
            group.share = 1 / chunks
            self._begin_wait(group, label, classes, turn.pace)

    def choose_victims(
        self, count: int, is_evictable: Callable[[OffloadKey], bool]
    ) -> Sequence[OffloadKey]:
        if not count:
            return []
        wanted = max(count, int(self._slots * _ORDERED), 1)
        if self._chosen > self._slots * _ORDERED or self.now_s - self._ordered_s > _ORDER_S:
            self._put_in_order(wanted)
        while True:
            victims = self._first_evictable(count, is_evictable)
            if len(victims) == count or wanted > 4 * len(self._groups):
                self._chosen += len(victims)
                return victims
            self._put_in_order(wanted)
            wanted *= 4

    def _first_evictable(
        self, count: int, is_evictable: Callable[[OffloadKey], bool]
    ) -> list[OffloadKey]:
        order, groups = self._order, self._groups
        victims: list[OffloadKey] = []
        while order and not order[0].present:
            order.popleft()
        for group in order:
            keys = group.keys
            while group.end and groups.get(keys[group.end - 1]) is not group:
                group.end -= 1
            here: Iterable[OffloadKey] = reversed(keys[: group.end])
            if group.kind is None or group.present < group.end:
                here = [key for key in here if groups.get(key) is group]
            victims += islice(filter(is_evictable, here), count - len(victims))
            if len(victims) == count:
                break
        return victims

    def _put_in_order(self, wanted: int) -> None:
        """Put the groups of the ``wanted`` least valuable chunks in the order of eviction."""
        self._ordered_s, self._chosen = self.now_s, 0
        if self.now_s - self._grown_s > _ORDER_S:
            self._grow_older()
        order: deque[_Group] = deque()
        self._order = order
        needed: list[_Group] = []
        found = 0
        for _, same in groupby(self._ranked, key=itemgetter(0)):
            # These groups have the same worth, so begin with the oldest turn's end.
            waiting = [_present(kind, self._waiting[bucket][kind]) for _, kind, bucket in same]
            for group in merge(*waiting, key=attrgetter("since_s", "uses")):
                if group.behind:
                    group.behind = [other for other in group.behind if other.present]
                    if group.behind:
                        needed.append(group)
                        continue
                order.append(group)
                found += group.present
                if found >= wanted:
                    return
        while needed:
            known = set(order)
            free = [of for of in needed if all(not on.present or on in known for on in of.behind)]
            order.extend(free or needed)
            needed = [of for of in needed if of not in free] if free else []
        for turn in self._turns.values():
            for _, group in sorted(turn.groups.items()):
                group.close()
                order.append(group)

    def _rates_of(self, label: str, of: int, pace: int) -> _Rates:
        rates = self._rates.get((label, of, pace))
        if rates is None:
            base = None if pace == _UNKNOWN else self._rates_of(label, of, _UNKNOWN)
            rates = self._rates[label, of, pace] = _Rates(base)
        return rates

    def _begin_wait(self, group: _Group, label: str, classes: int, pace: int = _UNKNOWN) -> None:
        kind = self._kinds.get((label, classes, pace))
        if kind is None:
            of_classes = [
                self._rates_of(label, of, pace) for of in range(len(_CLASSES)) if classes >> of & 1
            ]
            kind = self._kinds[label, classes, pace] = _Kind(label, classes, of_classes)
        group.kind, group.since_s, group.bucket = kind, self.now_s, 0
        group.close()
        cell = self._waiting[0][kind]
        if not cell:
            insort(self._ranked, (kind.worth(0), kind, 0), key=itemgetter(0))
        cell.append(group)
        kind.rates.note(0, 0.0, group.share * group.left * _WIDTHS[0] / 2)

    def _note_return(self, group: _Group, chunks: int, turn: _Turn) -> None:
        kind = group.kind
        group.left -= chunks
        if kind is None:
            # No wait has begun, because the request that used the chunks last still runs.
            return
        age = self.now_s - group.since_s
        kind.rates.note_return(group.bucket, age, group.share * chunks)
        turn.returned[group] = turn.returned.get(group, 0) + chunks
        if group.turn.end is group and not group.left:
            turn.pace = min(int(log2(age + 1) / 2), _SLOWEST)

    def _grow_older(self) -> None:
        """Move groups to the buckets for their ages, and rank the cells again."""
        self._grown_s = self.now_s
        for bucket, width in enumerate(_WIDTHS):
            if self.now_s - self._moved_s[bucket] >= width * _LATE:
                self._moved_s[bucket] = self.now_s
                self._move_on(bucket, self._waiting)
                self._move_on(bucket, self._gone)
        for rates in self._rates.values():
            rates.renew()
        self._ranked = [
            (kind.worth(bucket), kind, bucket)
            for bucket, cells in enumerate(self._waiting)
            for kind in cells
        ]
        self._ranked.sort(key=itemgetter(0))

    def _move_on(self, bucket: int, waits: list[_Cells]) -> None:
        since_s = self.now_s - _ENDS[bucket]
        cells = waits[bucket]
        for kind, cell in list(cells.items()):
            older: deque[_Group] | None = None
            share = 0.0
            # The oldest group is first, so the loop usually checks only one group.
            while cell:
                group = cell[0]
                if group.kind is not kind or not group.left:
                    cell.popleft()
                elif group.since_s < since_s:
                    share += group.share * group.left
                    group.bucket = bucket + 1
                    if older is None:
                        older = waits[bucket + 1][kind]
                    older.append(cell.popleft())
                elif not group.present and waits is self._waiting:
                    self._gone[bucket][kind].append(cell.popleft())
                else:
                    break
            if not cell:
                del cells[kind]
            if share:
                for of in (bucket, bucket + 1):
                    kind.rates.note(of, 0.0, share * _WIDTHS[of] / 2)

    def _forget(self, group: _Group) -> None:
        ghosts = self._ghosts
        for key in (*group.used, *group.keys):
            if ghosts.get(key) is group:
                del ghosts[key]
                group.left -= 1
        group.release_if_over()


class _Turn:
    def __init__(self) -> None:
        self.end: _Group | None = None  # the group with the end of the prefix
        self.pace = _UNKNOWN  # of the wait before the turn, if it continues a conversation
        self.groups: dict[int, _Group] = {}  # by number of uses
        self.returned: dict[_Group, int] = {}  # how many of each earlier group's chunks were used

    def group(self, uses: int) -> _Group:
        uses = min(uses, _MOST_USES)
        group = self.groups.get(uses)
        if group is None:
            group = self.groups[uses] = _Group(uses, self)
        return group


class _Group:
    """The chunks of one turn that have the same number of uses."""

    def __init__(self, uses: int, turn: _Turn) -> None:
        self.uses = uses
        self.turn = turn
        self.behind: list[_Group] = []  # groups of other turns, useless without these chunks
        self.keys: list[OffloadKey] = []  # in prefix order; some may have moved to other groups
        self.used: list[OffloadKey] = []
        self.end = 0  # all keys from this index on have left the pool or the group
        self.present = 0  # chunks in the pool
        self.left = 0  # chunks in the pool, and remembered evicted chunks
        self.share = 0.0  # one chunk's fraction of the turn
        self.kind: _Kind | None = None
        self.since_s = 0.0
        self.bucket = 0  # for the group's age; the rates include the wait up to the bucket's middle

    def release_if_over(self) -> None:
        """Drop the references of a group that has no chunks left, unless its request still runs."""
        if self.kind is not None and not self.left:
            self.keys, self.end, self.behind, self.turn = [], 0, [], _NO_TURN

    def close(self) -> None:
        if self.used:
            # In the prefix, used chunks precede newly stored chunks, even if a use was noted later.
            self.keys = self.used + self.keys
            self.used = []
        if len(self.keys) > self.left:
            # Remove duplicates: a chunk that left and came back is listed twice.
            self.keys = list(dict.fromkeys(self.keys))
        self.end = len(self.keys)


class _Kind:
    """A label, classes of uses, and a pace. At each age, groups of one kind have the same worth."""

    def __init__(self, label: str, classes: int, of_classes: list[_Rates]) -> None:
        self.label = label
        self.classes = classes
        self.rates = of_classes[0]
        self._of_classes = of_classes

    def worth(self, bucket: int) -> float:
        if self.label == _ENDED:
            return 0.0
        # A chunk is useless without the chunks before it, so its worth cannot exceed theirs.
        return min([rates.worths[bucket] for rates in self._of_classes])


class _Rates:
    """The returns and the waiting time at each age. ``base`` has the sums over all paces."""

    def __init__(self, base: _Rates | None = None) -> None:
        self._base = base
        self._returns = [0.0] * _BUCKETS
        self._waited = [0.0] * _BUCKETS
        self.worths: list[float] = []  # by bucket, the highest rate that further waiting promises
        self.rates: list[float] = []
        self._events = self._news = 0.0
        self.renew()

    def note(self, bucket: int, returned: float, waited: float) -> None:
        self._returns[bucket] += returned
        self._waited[bucket] += waited
        self._news += returned + waited / _WIDTHS[bucket]
        if self._base is not None:
            self._base.note(bucket, returned, waited)

    def note_return(self, bucket: int, age: float, share: float) -> None:
        """Record a return, and the part of the preceding wait that is not yet recorded."""
        noted = _WIDTHS[bucket] / 2
        while age > _ENDS[bucket]:
            self.note(bucket, 0.0, share * (_WIDTHS[bucket] - noted))
            noted = 0.0
            bucket += 1
        self.note(bucket, share, share * max(0.0, age - _BEGINS[bucket] - noted))

    def fade(self) -> None:
        self._events *= _MEMORY
        self._returns = [returns * _MEMORY for returns in self._returns]
        self._waited = [waited * _MEMORY for waited in self._waited]

    def renew(self) -> None:
        """Recompute the worths if there are enough new events."""
        if self.worths and self._news <= self._events * _NEWS:
            return
        self._events += self._news
        self._news = 0.0
        waits = []
        self.rates = []
        assumed = _ASSUMED
        for bucket, width in enumerate(_WIDTHS):
            returns, waited = self._returns[bucket], self._waited[bucket]
            if self._base is None:
                rate = (returns + assumed) / (waited + width)
                # A rate seldom drops to 0 from one age to the next, so carry over half of the rate.
                assumed = (_ASSUMED + rate * width) / 2
            else:
                known = _TRUST * width
                rate = (returns + known * self._base.rates[bucket]) / (waited + known)
            self.rates.append(rate)
            stays = exp(-rate * width)
            waits.append((1 - stays, (1 - stays) / rate, stays))
        # Extend each bucket's wait by one following stretch at a time, while this raises the rate.
        stretches: list[tuple[float, float, float]] = []
        self.worths = []
        for returned, waited, stays in reversed(waits):
            while stretches and stretches[-1][0] * waited > returned * stretches[-1][1]:
                returned_later, waited_later, stays_later = stretches.pop()
                returned += stays * returned_later
                waited += stays * waited_later
                stays *= stays_later
            stretches.append((returned, waited, stays))
            self.worths.append(returned / waited)
        self.worths.reverse()


_NO_TURN = _Turn()  # the turn of groups without chunks
_Cells = defaultdict[_Kind, deque[_Group]]


def _cells() -> list[_Cells]:
    return [defaultdict(deque) for _ in range(_BUCKETS)]


def _present(kind: _Kind, cell: deque[_Group]) -> Iterator[_Group]:
    return (group for group in cell if group.present and group.kind is kind)

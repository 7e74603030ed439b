"""From the routing of some forward passes to integers (routing.py says when).

Few ids in memory that the host shares with the device (Metal, CPU) are read as they are. On CUDA, where an array that
the host reads is moved first, and for the many ids of a prefill, the device counts: whole passes by layer (tallies.py),
and of calls with sets of their own each one (calls.py). docs/design.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import mlx.core as mx

from . import counting
from .calls import HOST_IDS, Calls, DeviceCalls, HostCalls
from .following import Followed
from .losses import losing
from .passes import HostPasses, Pass
from .store import Store
from .tallies import Key, Tally, full

Unit = Pass | Calls
Tallies = Mapping[Key, Tally]
_numbers = count()
"""Passes, in the order in which they are reduced."""


class Batch:
    """Passes under reduction. Once made, the device has begun, and large routing is not held any more.

    `carried` is what the device has added up and nobody reads yet, for the next batch to go on with. With anything else
    to read all of it is read: pool curves are told of passes in their order.
    """

    def __init__(self, units: Iterable[Unit], carried: Tallies) -> None:
        host_reads = not counting.on_cuda()
        tallies = dict(carried)
        kinds: dict[tuple[type, object], list[Any]] = {}
        for unit in units:
            number = next(_numbers)
            ones: Sequence[Any] = (unit,) if isinstance(unit, Pass) else unit
            for one in ones:
                one.number = number
                kinds.setdefault((type(one), one.kind()), []).append(one)
        self._parts: list[HostPasses | Tally | HostCalls | DeviceCalls] = []
        of_device: list[DeviceCalls] = []
        for (kind, _), alike in kinds.items():
            first = alike[0]
            if kind is Pass and host_reads and not first.packed and first.size <= HOST_IDS:
                self._parts.append(HostPasses(alike))
            elif kind is Pass:
                Tally.add(tallies, alike)
            elif host_reads and first.on_host():
                self._parts.append(HostCalls(alike))
            else:
                of_device.append(DeviceCalls(alike))
        self._parts += of_device
        read = host_reads or bool(self._parts) or full(tallies.values())
        if read:
            tallies = {key: tally.joined() for key, tally in tallies.items()}
        pending = [calls.arrays for calls in of_device] + [tally.arrays for tally in tallies.values()]
        if pending:
            with suppress(ValueError):  # not in a function under transformation: what is read is evaluated then
                mx.async_eval(pending)  # type: ignore[no-untyped-call]
        for part in of_device:
            part.release()
        if read:
            self._parts.extend(tallies.values())
        self.carried: Tallies = {} if read else tallies

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def count(self, store: Store) -> None:
        """Read the integers and count them; waits for the device where it is not done yet."""
        count_parts(store, self._parts)


def count_parts(store: Store, parts: Iterable[HostPasses | Tally | HostCalls | DeviceCalls]) -> None:
    """Read the integers of parts and count them."""
    followed = Followed()
    for part in parts:
        with losing(store, "routed_array"):
            part.count(store, followed)
    followed.hand_over()

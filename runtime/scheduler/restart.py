"""A new worker after the old one was lost: an empty cache, and every live branch from its tokens.

Nothing that a client was told is taken back. Requests that ran wait in line again, with the tokens that they had generated;
sampling is keyed by (seed, path, position), so their streams go on as if nothing had happened. Plans in flight are forgotten:
results that still arrive are dropped by their step id.
"""

from __future__ import annotations

from anabranch.runtime.messages import WorkerReady
from anabranch.runtime.scheduler.prefixes import Frontier
from anabranch.runtime.scheduler.requests import Request, State
from anabranch.runtime.scheduler.slots import Slots
from anabranch.runtime.scheduler.state import SchedulerState


def restart(s: SchedulerState, ready: WorkerReady) -> list[Request]:
    """Start over with the new worker. Returns ended requests whose branches can be given back now.

    Cost     copies the tokens of every open branch
    """
    requests = list(s.slots.used.values())
    old_slots = s.slots
    for request in requests:
        _leave_old_slot(s, request)
    s.flights.clear()
    s.copies.clear()
    s.fresh.clear()
    s.lease_ends.clear()
    s.group_tokens = []
    s.use(ready)
    s.manager = s.new_manager()
    s.frontier = Frontier()
    s.slots = Slots(s.max_running)
    s.slots.changes = old_slots.changes + 1
    for record in s.branches:
        if record.kv is not None:
            kv = s.manager.open(record.namespace)
            s.manager.append(kv, record.kv.tokens())
            record.kv = kv
    s.line.reorder()
    for request in requests:
        request.slot = -1
        if request.state is not State.ENDED:
            request.state = State.WAITING
            s.line.add(request)
    s.counters["worker_restarts"] += 1
    return [request for request in requests if request.state is State.ENDED]


def _leave_old_slot(s: SchedulerState, request: Request) -> None:
    """Keep what the request generated and what it cost."""
    slot, kv = request.slot, request.branch.known()
    if s.slots.buffered[slot]:
        s.manager.append(kv, s.slots.unbuffered(slot))
    request.num_steps += int(s.slots.num_steps[slot])
    request.frontier = None
    request.twins.clear()
    request.host, request.num_followers = None, 0
    request.is_forced = False

"""Rules for every client in every scenario: the rules of docs/streams.md, as functions of a transcript."""

from __future__ import annotations

import itertools
from collections import Counter

from grpc import StatusCode

from router.codec.lease_verbs import VERBS
from tests.conformance.transcript import Request, Saying, Stream, Transcript, credit_after, entries
from windrow.v1 import queue_pb2

# A program under test runs 4 jobs at the same time, and prefetches 4 more at most.
HANDLERS, ROOM = 4, 8
UNANSWERED_MAX = 2
ENTRIES_MAX = 1000
# A client must wait for at least this share of a pause. The share is less than 1 because timers are not exact.
EARLY = 0.95
ENDINGS = {verb.method.lower() for verb in VERBS} - {"extend"}


class Unmet(AssertionError):
    """A client did not do what a scenario expects."""

    def __init__(self, expected: str, seen: object) -> None:
        super().__init__(f"expected: {expected}; seen: {seen}")
        self.expected = expected
        self.seen = str(seen)


def require(held: object, expected: str, seen: object) -> None:
    """Raises Unmet unless the condition holds."""
    if not held:
        raise Unmet(expected, seen)


def check_rules(transcript: Transcript, *, room: int = ROOM) -> None:
    """Raises Unmet for the first rule that was broken. `room`: the most jobs that the client may give credit for."""
    for stream in transcript.streams:
        if stream.requests:
            _check_start(transcript, stream)
            _check_messages(stream, room=room)
    _check_endings(transcript)
    _check_pauses(transcript)


def _check_start(transcript: Transcript, stream: Stream) -> None:
    started = [request.HasField("start") for request in stream.requests]
    require(started[0] and not any(started[1:]), "`start` in the first message, and in no other", started)
    start = stream.requests[0].start
    named = (start.org, list(start.queues))
    require(named == (transcript.org, [transcript.queue]), "a start for WINDROW_ORG and WINDROW_QUEUE", named)


def _check_messages(stream: Stream, *, room: int) -> None:
    unanswered: set[int] = set()
    for at, event in enumerate(stream.events):
        if not isinstance(event.message, Request):
            unanswered -= {settled.request_id for settled in event.message.settled}
            continue
        credit = credit_after(stream.events[: at + 1])
        require(credit <= room, f"credit for {room} jobs at most", f"credit for {credit}")
        if said := entries(event.message):
            _check_message(event.message, said)
            number = event.message.request_id
            require(number and number not in unanswered, "a request_id that no unanswered message has", number)
            unanswered.add(number)
            most = f"at most {UNANSWERED_MAX} unanswered messages"
            require(len(unanswered) <= UNANSWERED_MAX, most, f"{len(unanswered)} unanswered messages")


def _check_message(message: queue_pb2.ConsumeRequest, said: list[tuple[str, bytes, bytes]]) -> None:
    most = max(Counter(verb for verb, _, _ in said).values())
    require(most <= ENTRIES_MAX, f"at most {ENTRIES_MAX} entries of a kind in a message", most)
    endings = Counter(lease for verb, lease, _ in said if verb in ENDINGS)
    require(max(endings.values(), default=0) <= 1, "a message that ends each lease once", message)


def _check_endings(transcript: Transcript) -> None:
    """Raises Unmet unless the client ended each lease only once. A client may repeat the entry only if there was no
    answer, or if the answer was an error."""
    said_of: dict[bytes, list[Saying]] = {}
    for said in transcript.sayings():
        said_of.setdefault(said.lease, []).append(said)
    for sayings in said_of.values():
        endings = [said for said in sayings if said.verb in ENDINGS]
        answered = [said.answer for said in endings if said.answer and not said.answer.startswith("error")]
        require(len(answered) <= 1, "each lease ended once", f"answers for one lease: {', '.join(answered)}")
        verbs = {said.verb for said in endings}
        require(len(verbs) <= 1, "the same verb again for a lease that was not answered", " and ".join(sorted(verbs)))
        twice = any(_overlap(one, again) for one, again in itertools.pairwise(endings))
        require(not twice, "no second message about a lease while the first is unanswered", "two of them")
        late = [said for said in sayings if said.verb == "extend" and endings and _after(said, endings[0])]
        require(not late, "no extend of a lease after its ack, nack or release", "an extend after it")


def _overlap(one: Saying, again: Saying) -> bool:
    """Returns whether the two entries were unanswered at the same time, on one stream."""
    return one.stream == again.stream and (not one.answer or again.at_s < one.answered_s)


def _after(one: Saying, other: Saying) -> bool:
    return (one.stream, one.place) > (other.stream, other.place)


def _check_pauses(transcript: Transcript) -> None:
    for stream, after in itertools.pairwise(transcript.streams):
        if stream.ended not in (None, StatusCode.OK, StatusCode.CANCELLED) and stream.retry_after_s:
            pause_s = after.opened_s - stream.ended_s
            asked = f"the next stream not before {stream.retry_after_s:g} s, as RetryInfo asks"
            require(pause_s >= EARLY * stream.retry_after_s, asked, f"a pause of {pause_s:.3f} s")

"""Clients with one mistake each. Every scenario must catch at least one of them."""

from __future__ import annotations

from grpc import StatusCode

from tests.conformance.reference import FATAL, Entry, Held, Message, ReferenceWorker
from tests.jobs import job_id
from windrow.v1 import job_pb2


class AcksWithoutResult(ReferenceWorker):
    def result_of(self, job: job_pb2.LeasedJob) -> bytes:
        return b""


class DoesNotSayItsOrg(ReferenceWorker):
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


class MakesNewIdsForEachTry(ReferenceWorker):
    def id_again(self, id_: str) -> str:
        return job_id()


class DoesNotPause(ReferenceWorker):
    def pause_s(self, asked_s: float | None, tries: int) -> float:
        return 0.001


class PausesAsItLikes(ReferenceWorker):
    """Ignores the delay that the router asks for, and tries again at once. If this client made its own pause, the pause
    could be as long as the delay on a busy machine, and would hide the fault."""

    def pause_s(self, asked_s: float | None, tries: int) -> float:
        return super().pause_s(None, tries) if asked_s is None else 0.0


class GivesCreditAgainWithARepeatedMessage(ReferenceWorker):
    def on_error(self, message: Message, asked_s: float | None) -> None:
        super().on_error(message, asked_s)
        self.credit -= max(1, message.credit)


class TakesMoreThanItHasRoomFor(ReferenceWorker):
    def credit_wanted(self) -> int:
        return max(0, self.handlers - self.credit)


class GivesCreditOnce(ReferenceWorker):
    def credit_wanted(self) -> int:
        return 0 if self.seen.jobs else super().credit_wanted()


class ReleasesInsteadOfSnoozing(ReferenceWorker):
    def snooze(self, job: job_pb2.LeasedJob) -> None:
        self.say(Entry(lease=job.lease, verb="release"))


class SnoozesForNoTime(ReferenceWorker):
    def snooze(self, job: job_pb2.LeasedJob) -> None:
        self.say(Entry(lease=job.lease, verb="snooze"))


class WorksForAsLongAsItLikes(ReferenceWorker):
    def on_runtime_over(self, held: Held) -> None:
        pass


class NeverExtends(ReferenceWorker):
    def extend(self, held: Held) -> None:
        pass


class RepeatsWhatIsNotOk(ReferenceWorker):
    def on_answer(self, entry: Entry, answer: job_pb2.JobAnswer.ValueType, sent_s: float) -> None:
        if entry.verb == "ack" and answer != job_pb2.JOB_ANSWER_OK:
            self.say(entry)


class IgnoresLostLeases(ReferenceWorker):
    def on_answer(self, entry: Entry, answer: job_pb2.JobAnswer.ValueType, sent_s: float) -> None:
        super().on_answer(entry, job_pb2.JOB_ANSWER_OK, sent_s)


class IgnoresRevokedLeases(ReferenceWorker):
    def on_revoked(self, lease: bytes) -> None:
        pass


class FallsOverStrangeLeases(ReferenceWorker):
    def on_revoked(self, lease: bytes) -> None:
        self.let_fall(self.held[lease])


class IgnoresDraining(ReferenceWorker):
    def on_draining(self) -> None:
        pass


class WaitsForItsHandlersWhenAStreamDrains(ReferenceWorker):
    def _may_close(self) -> bool:
        return super()._may_close() and not self.held


class GivesUp(ReferenceWorker):
    def is_fatal(self, code: StatusCode) -> bool:
        return True


class ForgetsWhatWasNotAnswered(ReferenceWorker):
    def say_again(self) -> None:
        self.unanswered.clear()


class NeverGivesUp(ReferenceWorker):
    def is_fatal(self, code: StatusCode) -> bool:
        return False


class RepeatsAMessageThatIsTooLarge(ReferenceWorker):
    def on_too_large(self, message: Message) -> None:
        self.credit -= message.credit
        self.parts.append(message.entries)
        # Without a pause the message would be refused thousands of times before the scenario gives up.
        self._not_before_s = self._loop.time() + 0.05
        self._loop.call_at(self._not_before_s, self.wake.set)


class LosesTheCreditOfAMessageThatIsTooLarge(ReferenceWorker):
    def on_too_large(self, message: Message) -> None:
        super().on_too_large(message)
        self.credit += message.credit


class WaitsForAnswersForEver(ReferenceWorker):
    def _on_silence(self, call: object, request_id: int) -> None:
        pass


class SendsEachAckAtOnce(ReferenceWorker):
    unanswered_max = 1000


class DropsItsJobsWhenItStops(ReferenceWorker):
    def has_held(self) -> bool:
        return False


class KeepsJobsThatComeLate(ReferenceWorker):
    def say(self, entry: Entry) -> None:
        if entry.verb != "release":
            super().say(entry)


# The scenario, the client, and a part of the text of the verdict. If the client fails for another reason, the scenario
# has not caught its mistake.
WRONG: tuple[tuple[str, type[ReferenceWorker], str], ...] = (
    ("work", AcksWithoutResult, "payload as result"),
    ("org", DoesNotSayItsOrg, "windrow-org"),
    ("retry", MakesNewIdsForEachTry, "the same ids"),
    ("retry", PausesAsItLikes, "a pause of 0.4 s"),
    ("settle-error", GivesCreditAgainWithARepeatedMessage, "credit for 8 jobs at most"),
    ("settle-error", PausesAsItLikes, "a pause of 0.2 s"),
    ("backoff", DoesNotPause, "before stream"),
    ("pause", PausesAsItLikes, "not before 1 s"),
    ("credit", TakesMoreThanItHasRoomFor, "credit for 4 to 8 jobs"),
    ("credit", GivesCreditOnce, "an ack of each job"),
    ("extend", NeverExtends, ""),
    ("stale", RepeatsWhatIsNotOk, "each lease ended once"),
    ("cancelled", RepeatsWhatIsNotOk, "each lease ended once"),
    ("lost", IgnoresLostLeases, "an ack of each job"),
    ("revoke", IgnoresRevokedLeases, "an ack of each job"),
    ("revoke", FallsOverStrangeLeases, ""),
    ("snooze", ReleasesInsteadOfSnoozing, "a snooze of the job"),
    ("snooze", SnoozesForNoTime, "a snooze for 0.4 s"),
    ("max-runtime", WorksForAsLongAsItLikes, "an ack of each job"),
    ("drain", IgnoresDraining, "closes its side"),
    ("drain", WaitsForItsHandlersWhenAStreamDrains, "an extend of the running job"),
    *[(f"end-{status}", GivesUp, "another stream") for status in ("unavailable", "internal", "unknown", "exhausted")],
    ("end-unavailable", ForgetsWhatWasNotAnswered, "an ack of each job"),
    *[
        (f"fatal-{code.name.lower().replace('_', '-')}", NeverGivesUp, "no other stream")
        for code in sorted(FATAL, key=str)
    ],
    ("oversize", RepeatsAMessageThatIsTooLarge, ""),
    ("oversize", LosesTheCreditOfAMessageThatIsTooLarge, "credit for the jobs that are due"),
    ("half-open", WaitsForAnswersForEver, "another stream"),
    ("collect", SendsEachAckAtOnce, "at most 2 unanswered"),
    ("stop", DropsItsJobsWhenItStops, "an ack of each job"),
    ("stop-late", KeepsJobsThatComeLate, "a release of the job"),
)

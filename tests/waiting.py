"""A consumer that waits for jobs, for tests that check which consumer is woken and which consumer gets new jobs."""

from __future__ import annotations

from collections.abc import Sequence

from router.buffer import Account, Buffer
from router.codec.fast_write import Delivery
from shard.vocabulary import OrgId, QueueName
from tests.jobs import QUEUE


class WaitingConsumer:
    """A waiting consumer, as wait rooms and pools see it. It counts its credit and how often it was woken. No jobs may
    be handed over to it."""

    def __init__(
        self,
        org: OrgId,
        *queues: str,
        kinds: Sequence[str] = (),
        credit: int = 1,
        takes_once: bool = False,
        all_orgs: bool = False,
        buffer: Buffer | None = None,
    ) -> None:
        self.org = org
        self.queues = [QueueName(queue) for queue in queues or (QUEUE,)]
        self.worker, self.window_us, self.kinds = "w", 1_000_000, kinds
        self.buffer = buffer or Buffer(2**20)
        self.account = Account(self.buffer, org=org, peer="p")
        self.credit = credit
        self.takes_once = takes_once
        self.all_orgs = all_orgs
        self.idle = True
        self.full = self.promised = self.looking = False
        self.woken = 0

    def account_of(self, org: OrgId) -> Account:
        return self.account.of(org) if self.all_orgs else self.account

    def wake(self) -> None:
        self.looking = True
        self.woken += 1

    def give(self, jobs: Delivery) -> None:
        raise AssertionError(f"no job is leased here: {jobs}")

    take = give

    def keep_places(self, jobs: int) -> None:
        self.credit -= jobs
        if self.takes_once:
            self.idle, self.promised = False, True

    def free_places(self, unused: int) -> None:
        self.promised = False
        if unused:
            self.credit += unused
            self.wake()

"""The campaign: which messages a person gets, and when. Plans the messages of new people, and changes the plan of a
person.

python -m examples.campaigns.plan shop start --signup s-1001 ada@example.com bob@example.com
python -m examples.campaigns.plan shop stop ada@example.com
python -m examples.campaigns.plan shop move bob@example.com --days 7
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import windrow

QUEUE = "campaigns"
KIND = "send_message"
CAMPAIGN = "welcome"
# The messages, and for each the number of days between the start and the message.
STEPS = {"hello": 0, "tips": 3, "offer": 14, "survey": 30, "anniversary": 365}


def start(client: windrow.SyncClient, signup: str, people: Sequence[str]) -> int:
    """Plans all messages of these people. Returns how many are new. `signup`: the id of the event by which these people
    signed up. If the same signup comes again within 30 days, which is the longest dedup window, nothing is planned
    twice."""
    now = datetime.now(UTC)
    jobs = [
        windrow.NewJob(
            QUEUE,
            KIND,
            {"to": person, "subject": f"{CAMPAIGN}: {step}"},
            # With these attributes, you can find the messages of a person or of a step.
            attributes={"campaign": CAMPAIGN, "person": person, "step": step},
            run_at=now + timedelta(days=days),
            dedup_key=f"{signup} {person} {step}",
            dedup_window=timedelta(days=30),
        )
        for person in people
        for step, days in STEPS.items()
    ]
    # This call stores all jobs or none, and takes at most 1,000. For more jobs, use `independent=True`, or
    # `enqueue_batch`.
    return sum(not one.duplicate for one in client.enqueue_many(jobs))


def stop(client: windrow.SyncClient, person: str) -> int:
    """Cancels the messages that a person has not got yet. Returns the number of cancelled messages."""
    of_person = windrow.JobFilter(queue=QUEUE, attributes={"campaign": CAMPAIGN, "person": person})
    return client.cancel_where(of_person, reason="unsubscribed").changed


def move(client: windrow.SyncClient, person: str, days: float) -> int:
    """Postpones by `days` all messages that a person has not got yet. Returns the number of changed messages."""
    moved = 0
    # With several states, the list is in the order of the ids, so a message that is moved keeps its place in the list.
    states = [windrow.JobState.SCHEDULED, windrow.JobState.READY]
    for job in client.iter_jobs(QUEUE, states=states, attributes={"campaign": CAMPAIGN, "person": person}):
        # Change each message by its own call, because each has another time. For a message that a worker is sending
        # now, the answer is STALE, and the message stays as it is.
        (answer,) = client.alter_jobs([job.id], run_at=job.run_at + timedelta(days=days))
        moved += answer is windrow.Answer.OK
    return moved


def main() -> None:
    parser = argparse.ArgumentParser(description="Plans the messages of a campaign.")
    parser.add_argument("org")
    commands = parser.add_subparsers(dest="command", required=True)
    starting = commands.add_parser("start", help="plan all messages of people")
    starting.add_argument("--signup", required=True, metavar="ID", help="what they did")
    starting.add_argument("people", nargs="+", metavar="PERSON")
    stopping = commands.add_parser("stop", help="cancel the messages of a person")
    stopping.add_argument("person")
    moving = commands.add_parser("move", help="send the messages of a person later")
    moving.add_argument("person")
    moving.add_argument("--days", type=float, required=True)
    given = parser.parse_args()
    with windrow.SyncClient(org=given.org) as client:
        match given.command:
            case "start":
                print(f"{start(client, given.signup, given.people)} messages are planned")
            case "stop":
                print(f"{stop(client, given.person)} messages are cancelled")
            case _:
                print(f"{move(client, given.person, given.days)} messages are moved")


if __name__ == "__main__":
    main()

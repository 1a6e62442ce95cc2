"""The program that README.md asks for, with the Python client."""

import asyncio
import os

from windrow import Client, Job, Snooze, Worker


async def main() -> None:
    environ = os.environ
    queue = environ["WINDROW_QUEUE"]
    answer_s, window_s = (int(environ[name]) / 1000 for name in ("WINDROW_ANSWER_MS", "WINDROW_WINDOW_MS"))
    async with Client(environ["WINDROW_ADDRESS"], org=environ["WINDROW_ORG"], try_timeout=answer_s) as client:
        worker = Worker(client, queue, concurrency=4, prefetch=4, visibility_window=window_s)

        @worker.handler("work")
        async def work(job: Job) -> bytes:
            await asyncio.sleep(int(job.payload) / 1000)
            return job.payload

        @worker.handler("enqueue")
        async def enqueue(job: Job) -> bytes:
            await client.enqueue(queue, "work", b"0")
            return job.payload

        snoozed = set[str]()

        @worker.handler("snooze")
        async def snooze(job: Job) -> bytes:
            if job.id not in snoozed:
                snoozed.add(job.id)
                raise Snooze("the first time", after=int(job.payload) / 1000)
            return job.payload

        await worker.run()


if __name__ == "__main__":
    asyncio.run(main())

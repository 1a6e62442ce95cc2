"""The newsletter as a FastAPI application, with a worker in a thread of its process.

python -m examples.newsletter.fastapi_app news --port 8001
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

import windrow
from examples.newsletter.newsletter import Settings, Subscribers, mail_to, make_worker, settings_of, working


class Subscription(BaseModel):
    address: str


def make_app(settings: Settings) -> FastAPI:
    subscribers = Subscribers(settings.file)
    # The client of the worker belongs to the event loop of the worker's thread. So this second client is for the event
    # loop of FastAPI.
    client = windrow.Client(org=settings.org)
    worker = make_worker(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        async with client:
            with working(worker) as app.state.worker:
                yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/subscribers", status_code=202)
    async def subscribe(subscription: Subscription) -> dict[str, str]:
        subscribers.add(subscription.address)
        try:
            # If the client sends the same `NewJob` again, the job is stored once.
            (stored,) = await client.enqueue_many([mail_to(subscription.address, "Welcome")])
        except windrow.WindrowError as error:
            raise HTTPException(503, str(error)) from error
        return {"welcome": stored.id}

    @app.get("/health")
    async def health() -> dict[str, str]:
        # A worker ends by itself only after an error that no retry can fix, such as a revoked key.
        if not app.state.worker.is_alive():
            raise HTTPException(503, "the worker has ended")
        return {"worker": "runs"}

    return app


def main() -> None:
    settings = settings_of("The newsletter as a FastAPI application.", port=8001)
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.INFO)
    uvicorn.run(make_app(settings), host="127.0.0.1", port=settings.port, log_level="warning")


if __name__ == "__main__":
    main()

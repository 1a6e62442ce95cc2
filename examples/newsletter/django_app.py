"""The newsletter as a Django application, with a worker in a thread of its process.

python -m examples.newsletter.django_app news --port 8002
"""

# Django has no type hints.
from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from typing import Any
from wsgiref.simple_server import make_server

import django
from django.conf import settings as django_settings
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, JsonResponse
from django.urls import path

import windrow
from examples.newsletter.newsletter import Settings, Subscribers, mail_to, make_worker, settings_of, working


def make_application(settings: Settings, worker: threading.Thread) -> Any:
    """Returns the WSGI application. `worker`: the thread of the worker."""
    subscribers = Subscribers(settings.file)
    # The views are not coroutines, so they need a `SyncClient`. Any number of threads may use the same one.
    client = windrow.SyncClient(org=settings.org)

    def subscribe(request: HttpRequest) -> JsonResponse:
        address = str(json.loads(request.body)["address"])
        subscribers.add(address)
        try:
            # In a view that uses a Django transaction, make this call by `transaction.on_commit()`.
            (stored,) = client.enqueue_many([mail_to(address, "Welcome")])
        except windrow.WindrowError as error:
            return JsonResponse({"error": str(error)}, status=503)
        return JsonResponse({"welcome": stored.id}, status=202)

    def health(_: HttpRequest) -> JsonResponse:
        # A worker ends by itself only after an error that no retry can fix, such as a revoked key.
        runs = worker.is_alive()
        return JsonResponse({"worker": "runs" if runs else "has ended"}, status=200 if runs else 503)

    urls = (path("subscribers", subscribe), path("health", health))
    django_settings.configure(ALLOWED_HOSTS=["127.0.0.1"], ROOT_URLCONF=urls, MIDDLEWARE=[])
    django.setup()
    return get_wsgi_application()


def main() -> None:
    settings = settings_of("The newsletter as a Django application.", port=8002)
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", level=logging.INFO)
    # Let SIGTERM end the block below in an orderly way.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with (
        working(make_worker(settings)) as worker,
        make_server("127.0.0.1", settings.port, make_application(settings, worker)) as server,
    ):
        server.serve_forever()


if __name__ == "__main__":
    main()

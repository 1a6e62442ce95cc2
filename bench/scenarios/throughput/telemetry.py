"""Routers with traces, with metrics, or with both. Also the processes that receive the traces and the metrics: an OTLP
sink and a scraper.

Users run the receivers on other machines. In this benchmark, the receivers take CPU time from the routers.
"""

from __future__ import annotations

import asyncio
import urllib.request
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from bench.stage import Servers, Stage
from bench.system import Wrong
from bench.systems import MEASURED, TELLING, TRACED
from proof.background import background
from proof.processes import free_port, serving

SYSTEMS = (TRACED, MEASURED, TELLING)
_SCRAPE_S = 5.0
# A batch span processor waits for at most 5 s by default before it sends spans. This time is a little longer.
_EXPORT_S = 6.0


@dataclass(slots=True)
class Listeners:
    _sink: Process
    _sink_port: str
    # Where routers serve metrics: HOST:PORT.
    _targets: list[str] = field(default_factory=list[str])
    _scrapes: int = 0

    async def routers(self, stage: Stage, system: str, processes: int) -> Servers:
        """Starts routers with the telemetry of this system."""
        tables, environ = "", {}
        if system in {MEASURED, TELLING}:
            target = f"127.0.0.1:{free_port()}"
            tables = f'\n[router]\nmetrics = "{target}"\n'
            self._targets.append(target)
        if system in {TRACED, TELLING}:
            environ = {
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://127.0.0.1:{self._sink_port}",
                "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true",
                "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
                "OTEL_TRACES_SAMPLER_ARG": "0.01",
            }
        _, servers = await stage.routers_with(f"{system}.toml", tables, processes=processes, environ=environ)
        return servers

    async def scrape(self) -> None:
        """Reads all metrics again and again, until this task is cancelled."""
        while True:
            await asyncio.sleep(_SCRAPE_S)
            for target in self._targets:
                await asyncio.to_thread(_read, f"http://{target}/metrics")
                self._scrapes += 1

    async def heard(self) -> str:
        """Returns how much has arrived. Raises Wrong if nothing has arrived."""
        await asyncio.sleep(_EXPORT_S)
        assert self._sink.stdin is not None
        assert self._sink.stdout is not None
        self._sink.stdin.write(b"?\n")
        spans = int(await self._sink.stdout.readline())
        if not spans or not self._scrapes:
            raise Wrong(f"the sink got {spans} spans and the scraper {self._scrapes} answers: something was off")
        return f"the sink got {spans:,} spans, the scraper {self._scrapes:,} answers"


@asynccontextmanager
async def listening() -> AsyncGenerator[Listeners, None]:
    async with serving("bench.otlp_sink") as (sink, port):
        listeners = Listeners(sink, port)
        async with background(listeners.scrape()):
            yield listeners


def _read(url: str) -> None:
    with urllib.request.urlopen(url, timeout=10) as answer:
        answer.read()

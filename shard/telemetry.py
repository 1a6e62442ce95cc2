"""Which signals OpenTelemetry should export, by its standard environment variables.

A signal is on if OTEL_<SIGNAL>_EXPORTER=otlp, or if OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_<SIGNAL>_ENDPOINT
is set. It is off with OTEL_SDK_DISABLED=true or OTEL_<SIGNAL>_EXPORTER=none.
"""

from __future__ import annotations

import os
from typing import Literal


def is_on(signal: Literal["TRACES", "METRICS", "LOGS"]) -> bool:
    exporter = os.environ.get(f"OTEL_{signal}_EXPORTER", "").lower()
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return False
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    return exporter == "otlp" or any(os.environ.get(name) for name in endpoints)

"""Formats sizes and durations for messages."""

from __future__ import annotations


def size_text(size: float) -> str:
    """Formats bytes, for example as 8.0 kB or 1.2 GB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1024
    return f"{size:,.0f} bytes" if unit == "bytes" else f"{size:,.1f} {unit}"


def span_text(seconds: float) -> str:
    """Formats a duration by its two largest units, for example as 41s, 3m20s or 2d4h."""
    remaining, text, parts = max(0, round(seconds)), "", 0
    for unit, unit_s in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        count, remaining = divmod(remaining, unit_s)
        if parts or count:
            parts += 1
            text += f"{count}{unit}" if count else ""
        if parts == 2:
            break
    return text or "0s"

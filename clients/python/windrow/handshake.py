"""Finds out why TLS prevents a connection to an address: one side speaks TLS and the other does not, or one side does
not accept the other's certificate.

gRPC reports all of these faults as UNAVAILABLE, like a router that does not answer, and some only as "Socket closed".
So this module makes one or two connections of its own, and checks how the router reacts. It blocks for a few seconds at
most. A router that does not answer, or that is about to stop, is not reported as a fault.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
from collections.abc import Generator
from enum import Enum, auto

from windrow.address import uses_proxy
from windrow.tls import Pem, Tls, pem_text

_CONNECT_S = 2.0
_HOST_AND_PORT = re.compile(r"\[?([^\[\]]+)\]?:([0-9]+)")
# The preface of an HTTP/2 client, with empty SETTINGS. A server's first frame is SETTINGS, too (RFC 9113, section 3.4).
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_BYTES, _TYPE_AT, _SETTINGS = 9, 3, 4
# Connect twice, because a router that stops may close one connection after its handshake. It does so only once.
_TIMES = 2


class _Answer(Enum):
    """What a server answered to the preface of HTTP/2."""

    SETTINGS = auto()
    CLOSED = auto()
    # The server has sent nothing yet, or something else.
    OTHER = auto()


def fault(address: str, tls: Tls | None, pem: Pem | None) -> str | None:
    """Returns a text that says what is wrong and what to do. Returns None if nothing is wrong or the router does not
    answer."""
    found = _HOST_AND_PORT.fullmatch(address)
    if found is None or (uses_proxy(address) and _has_proxy()):
        # gRPC does not connect to this address directly, and this module cannot connect in the same way.
        return None
    at = found[1], int(found[2])
    try:
        return _fault_of_plain_text(at) if tls is None else _fault_of_tls(at, tls, pem)
    except OSError:
        return None


def _fault_of_plain_text(at: tuple[str, int]) -> str | None:
    with _connected(at) as connection:
        answer = _ask(connection)
    if answer is not _Answer.CLOSED:
        return None
    try:
        with _connected(at) as connection, _unverified().wrap_socket(connection):
            pass
    except OSError:
        return None
    return (
        "the router takes TLS connections only, and this client makes plain ones: write the address as "
        "grpcs://HOST:PORT, or name the CA of the router's certificate (tls=, WINDROW_TLS_CA)"
    )


def _fault_of_tls(at: tuple[str, int], tls: Tls, pem: Pem | None) -> str | None:
    context = _context(tls, pem)
    for _ in range(_TIMES):
        try:
            with (
                _connected(at) as connection,
                context.wrap_socket(connection, server_hostname=tls.server_name or at[0]) as secured,
            ):
                answer = _ask(secured)
        except ssl.SSLCertVerificationError as error:
            return _distrust(error, tls)
        except (ssl.SSLError, ConnectionError):
            return _fault_of_server(at)
        if answer is not _Answer.CLOSED:
            return None
    if tls.certificate is None:
        return (
            "the router closes the connection after the TLS handshake: it demands a client certificate. Pass one with "
            "tls=Tls(certificate=, key=), or WINDROW_TLS_CERTIFICATE and WINDROW_TLS_KEY"
        )
    return (
        f"the router closes the connection after the TLS handshake: it does not accept the client certificate "
        f"{tls.certificate}. Its CA must be in the router's [tls] client_ca, and it must not have expired"
    )


def _fault_of_server(at: tuple[str, int]) -> str | None:
    """Returns the fault if the handshake failed because the server speaks plain HTTP/2. Otherwise returns None."""
    with _connected(at) as connection:
        if _ask(connection) is not _Answer.SETTINGS:
            return None
    return (
        "the router does not speak TLS, and this client demands it: add [tls] to the router's cluster file, or, if "
        "nobody else can read the network between them, connect without tls= and grpcs://"
    )


def _distrust(error: ssl.SSLCertVerificationError, tls: Tls) -> str:
    # The numbers are OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED, …CERT_NOT_YET_VALID, …HOSTNAME_MISMATCH and
    # …IP_ADDRESS_MISMATCH.
    match error.verify_code:
        case 10:
            return "the router's certificate has expired: its operator must replace the files of [tls]"
        case 9:
            return "the router's certificate is not valid yet: compare this machine's clock with the router's"
        case 62 | 64:
            return (
                f"the router's certificate is for another name ({error.verify_message}): connect by the name in it, or "
                "give that as Tls(server_name=) or WINDROW_TLS_SERVER_NAME"
            )
        case _:
            trusted = f"those in {tls.ca}" if tls.ca else "those of the operating system"
            return (
                f"the router's certificate comes from a CA that this client does not trust ({error.verify_message}). "
                f"It trusts {trusted}: name the file of the router's CA (tls=, WINDROW_TLS_CA)"
            )


@contextlib.contextmanager
def _connected(at: tuple[str, int]) -> Generator[socket.socket, None, None]:
    with socket.create_connection(at, _CONNECT_S) as connection:
        yield connection


def _ask(connection: socket.socket) -> _Answer:
    """Sends the preface and waits for the first frame."""
    got = b""
    try:
        connection.sendall(_PREFACE)
        while len(got) < _FRAME_BYTES:
            part = connection.recv(_FRAME_BYTES - len(got))
            if not part:
                return _Answer.CLOSED
            got += part
    except TimeoutError:
        return _Answer.OTHER
    except (ssl.SSLError, ConnectionError):
        # A server may reset the connection, or send an alert.
        return _Answer.CLOSED
    return _Answer.SETTINGS if got[_TYPE_AT] == _SETTINGS else _Answer.OTHER


def _context(tls: Tls, pem: Pem | None) -> ssl.SSLContext:
    roots = pem.roots if pem is not None else None
    context = ssl.create_default_context(cadata=None if roots is None else pem_text(roots))
    # Verify as gRPC does.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.set_alpn_protocols(["h2"])
    if tls.certificate is not None and tls.key is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    return context


def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def _has_proxy() -> bool:
    return any(os.environ.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy"))

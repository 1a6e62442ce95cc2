"""Makes, lists, revokes and finds API keys in the catalog's database.

A key is the text `wr_ID_SECRET`. The database has the SHA-256 of the secret only, so whoever reads the database cannot
make calls. router/gate/auth decides who may do what with a key. The parameter `database` is always the catalog's
database.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date
from typing import NamedTuple

from shard.admin import statements
from shard.errors import UnknownApiKey
from shard.postgres import arrays
from shard.postgres.pool import Database
from shard.vocabulary import Micros, OrgId

PREFIX = "wr_"
_ID_CHARS, _ALPHABET = 12, "abcdefghijklmnopqrstuvwxyz234567"
_SECRET_BYTES = 32
_KEY = re.compile(rf"{PREFIX}([a-z2-7]{{{_ID_CHARS}}})_([A-Za-z0-9_-]{{43}})", re.ASCII)
_KEY_ID = re.compile(rf"(?:{PREFIX})?([a-z2-7]{{{_ID_CHARS}}})", re.ASCII)
NAME_CHARS_MAX = 100


class ApiKey(NamedTuple):
    """A key as operators see it."""

    id: str
    # None: all orgs.
    org: OrgId | None
    scopes: Sequence[str]
    name: str
    created_at: Micros
    expires_at: Micros | None
    revoked_at: Micros | None
    # The latest UTC day on which a router accepted the key.
    last_used: date | None
    # Whether the key had expired when it was read, by the catalog's clock.
    expired: bool


class StoredKey(NamedTuple):
    """A key as routers verify it."""

    secret_sha256: bytes
    org: OrgId | None
    scopes: Sequence[str]
    # The seconds until the key expires. None: the key does not expire.
    expires_in_s: float | None
    revoked: bool


class FoundKeys(NamedTuple):
    """Keys by id, and how many revocations of keys the catalog had counted when these keys were read."""

    revocations: int
    keys: Mapping[str, StoredKey]


class KeyText(NamedTuple):
    """The parts of a key."""

    id: str
    secret_sha256: bytes


def parse(text: str) -> KeyText | None:
    """Returns the parts of a key, or None if the text is not a key."""
    found = _KEY.fullmatch(text)
    return None if found is None else KeyText(found[1], _sha256(found[2]))


def parse_id(text: str) -> str | None:
    """Returns the id of a key, which may be written as `wr_ID`, or None if the text is not an id."""
    found = _KEY_ID.fullmatch(text)
    return None if found is None else found[1]


def draw_id() -> str:
    """Returns an id for a new key, without the prefix."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(_ID_CHARS))


async def create(
    database: Database,
    *,
    org: OrgId | None,
    scopes: Iterable[str],
    name: str,
    expires_in_s: int | None,
    key_id: str | None = None,
) -> tuple[ApiKey, str]:
    """Stores a new key. Returns the key and its text, which nobody can read again later. If this raises
    ShardUnavailable, the key may have been stored, but nobody has its text. `key_id` is an id that draw_id returned.
    None: the key gets a new id."""
    key_id = key_id or draw_id()
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    rows = await database.run(
        statements.CREATE_API_KEY,
        {
            "id": key_id,
            "secret_sha256": _sha256(secret),
            "org": org,
            "scopes": arrays.plain(scopes),
            "name": name,
            "expires_in_s": expires_in_s,
        },
    )
    return ApiKey(*rows[0]), f"{PREFIX}{key_id}_{secret}"


async def read_all(database: Database) -> list[ApiKey]:
    """Returns all keys, the newest first."""
    return [ApiKey(*row) for row in await database.run(statements.LIST_API_KEYS, {})]


async def revoke(database: Database, key_id: str) -> ApiKey:
    """Ends the use of a key on all routers. A second call changes nothing. Raises UnknownApiKey."""
    rows = await database.run(statements.REVOKE_API_KEY, {"id": key_id})
    if not rows:
        raise UnknownApiKey(key_id)
    return ApiKey(*rows[0])


async def find(database: Database, ids: Collection[str]) -> FoundKeys:
    """Returns the keys with these ids, read from one snapshot. Leaves out keys that do not exist."""
    rows = await database.run(statements.FIND_API_KEYS, {"ids": arrays.plain(ids)})
    keys = {row[1]: StoredKey(bytes(row[2]), *row[3:]) for row in rows if row[1] is not None}
    return FoundKeys(rows[0][0], keys)


async def record_use(database: Database, ids: Collection[str]) -> None:
    """Records that keys were used today."""
    await database.run(statements.RECORD_API_KEY_USE, {"ids": arrays.plain(ids)})


def _sha256(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()

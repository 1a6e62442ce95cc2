"""Makes and reads the tokens that say where the next page of workflows, nodes or parents begins."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

from shard.errors import BadPageToken
from shard.job_id import is_uuid
from shard.workflow import ParentRecord, WorkflowId


def pack(key: str) -> str:
    """Returns the token of the page that begins at or after this key."""
    return base64.urlsafe_b64encode(key.encode()).decode()


def _unpack(token: str) -> str:
    """Returns the text in a page token, which a caller may have forged. Raises BadPageToken."""
    try:
        return base64.urlsafe_b64decode(token.encode()).decode()
    except (ValueError, binascii.Error) as error:
        raise BadPageToken(token) from error


def unpack_id(token: str) -> WorkflowId:
    """Returns the id of a workflow in a page token. Raises BadPageToken."""
    text = _unpack(token)
    if not is_uuid(text):
        raise BadPageToken(token)
    return WorkflowId(text)


def unpack_number(token: str) -> int:
    """Returns the number of a node in a page token. Raises BadPageToken."""
    text = _unpack(token)
    if not text.isascii() or not text.isdigit() or len(text) > len("10000"):
        raise BadPageToken(token)
    return int(text)


def parents_token(parents: Sequence[ParentRecord]) -> str:
    """Returns the token of the page that begins with the first of these parents."""
    return pack(str(parents[0].number)) if parents else ""


def parents_from(token: str) -> int:
    """Returns the number with which a page of parents begins. Raises BadPageToken."""
    return unpack_number(token) if token else 0

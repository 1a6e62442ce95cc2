"""Profiles: addresses that `windrow login` has kept, each with its token and its TLS files.

All profiles are in one TOML file, which only its owner can read. Options and environment variables override a profile.
The profile `default` applies if no profile is named and no address is given, so its token never goes to another address
by mistake.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cli import output, token
from cli.exits import CommandFailed, ExitCode

if TYPE_CHECKING:
    from windrow import Tls

DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How to reach a cluster. A field that is not set is an empty text."""

    address: str = ""
    token: str = ""
    # PEM files, and the name in the router's certificate, as in windrow.Tls.
    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    tls_server_name: str = ""

    def __repr__(self) -> str:
        return f"Profile(address={self.address!r})"


@dataclass(slots=True)
class _Choice:
    """The profile that the running command uses."""

    # The name that the user gave. None: the user gave none.
    name: str | None = None
    profile: Profile | None = None
    is_read: bool = False
    # Whether the profile counts even if an option or an environment variable is set.
    alone: bool = False
    # Whether the default profile does not apply, because an address is given.
    is_passed_over: bool = False


_choice = _Choice()


def path() -> Path:
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(folder).expanduser() / "windrow" / "profiles.toml"


def select(name: str | None) -> None:
    """Chooses the command's profile by its name. None: `default`, if there is one. Reads the file only when needed."""
    _choice.name, _choice.profile, _choice.is_read, _choice.alone = name, None, False, False
    _choice.is_passed_over = False


def name() -> str | None:
    """Returns the name that `select` was given."""
    return _choice.name


def use(profile: Profile) -> None:
    """Makes the command use this profile, which nothing overrides."""
    _choice.profile, _choice.is_read, _choice.alone = profile, True, True


def address(given: str, *, is_given: bool) -> str:
    """Returns the address that a command calls. `is_given`: whether an option or the environment gives `given`. Raises
    CommandFailed."""
    if is_given and _choice.name is None:
        # The token and the files of the default profile must not be used for another address.
        _choice.profile, _choice.is_read, _choice.is_passed_over = None, True, True
        return given
    profile = _current()
    return given if is_given or profile is None or not profile.address else profile.address


def token_of_calls() -> str | None:
    """Returns the bearer token of the command's calls, or None if it has none. Raises CommandFailed."""
    profile = _current()
    own = profile.token or None if profile is not None else None
    return own if _choice.alone else token.token() or own


def where_tokens_are() -> str:
    """Returns where the command's token came from. If the command has no token, returns where the user may put one. The
    text is for the error of a call whose caller is not known. Raises CommandFailed."""
    profile = _current()
    name = _choice.name or DEFAULT
    own = profile is not None and bool(profile.token)
    if _choice.alone:
        return "this login was given the token" if own else "a token comes from --token-file"
    if (source := token.source()) is not None:
        over = f", which overrides the token of the profile {name!r}" if own else ""
        text = f"the token came from {source}{over}"
    elif own:
        again = "windrow login" if name == DEFAULT else f"windrow login --profile {name}"
        text = f"the token came from the profile {name!r} in {path()}: replace it with `{again}`"
    else:
        text = "a token comes from --token-file or WINDROW_TOKEN, or from a profile, which `windrow login` makes"
    if not _choice.is_passed_over or DEFAULT not in _read():
        return text
    return (
        f"{text}; the profile {DEFAULT!r} is not used, because --address or WINDROW_ADDRESS is given: name it with "
        f"--profile {DEFAULT}, or leave the address out"
    )


def tls(*, secure: bool) -> Tls | None:
    """Returns how to connect by TLS, or None for plain text. `secure`: the address says grpcs://. Raises CommandFailed,
    InvalidRequest."""
    from windrow import tls as client_tls

    profile = _current()
    found = ({} if profile is None else _tls_of(profile)) | ({} if _choice.alone else client_tls.environment())
    return client_tls.Tls(**found) if found or secure else None


def _current() -> Profile | None:
    if not _choice.is_read:
        known = _read()
        if _choice.name is not None and _choice.name not in known:
            there = f"it has only {', '.join(map(repr, known))}" if known else "it has none"
            raise CommandFailed(
                f"no profile {_choice.name!r} in {path()}; {there}: make one with `windrow login --profile "
                f"{_choice.name}`",
                ExitCode.USAGE,
            )
        _choice.profile, _choice.is_read = known.get(_choice.name or DEFAULT), True
    return _choice.profile


def keep(name: str, profile: Profile) -> None:
    """Writes a profile. Comments in the file are lost."""
    _write(_read() | {name: profile})


def remove(name: str) -> bool:
    """Removes a profile. Returns whether it existed."""
    known = _read()
    if name not in known:
        return False
    del known[name]
    _write(known)
    return True


def _tls_of(profile: Profile) -> dict[str, str]:
    found = {
        "ca": profile.tls_ca,
        "certificate": profile.tls_certificate,
        "key": profile.tls_key,
        "server_name": profile.tls_server_name,
    }
    return {field: value for field, value in found.items() if value}


def _read() -> dict[str, Profile]:
    file = path()
    try:
        text = file.read_text(encoding="utf-8")
        if file.stat().st_mode & 0o077:
            output.note(f"other users can read the tokens in {file}: chmod 600 {file}")
        document = tomllib.loads(text)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CommandFailed(f"{file}: {error.strerror}", ExitCode.USAGE) from error
    except ValueError:
        # Raise without the cause, because the cause may quote a token.
        raise CommandFailed(f"{file}: is not TOML; correct it, or remove it and log in again", ExitCode.USAGE) from None
    return {name: _profile(name, table) for name, table in document.items()}


def _profile(name: str, table: object) -> Profile:
    known = {field.name for field in fields(Profile)}
    values = cast("Mapping[str, Any]", table) if isinstance(table, dict) else None
    if values is None or not all(key in known and isinstance(value, str) for key, value in values.items()):
        raise CommandFailed(
            f"{path()}: [{name}] must be a table of texts with the keys {', '.join(sorted(known))}", ExitCode.USAGE
        )
    return Profile(**values)


def _write(profiles: Mapping[str, Profile]) -> None:
    from embedded.folders import write_file

    file = path()
    text = "".join(f"[{_quoted(name)}]\n{_lines(profile)}\n" for name, profile in profiles.items())
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(file, text, mode=0o600)
    except OSError as error:
        raise CommandFailed(f"{file}: {error.strerror}", ExitCode.REFUSED) from error


def _lines(profile: Profile) -> str:
    values = {field.name: getattr(profile, field.name) for field in fields(Profile)}
    return "".join(f"{key} = {_quoted(value)}\n" for key, value in values.items() if value)


def _quoted(text: str) -> str:
    # JSON and TOML quote printable text in the same way.
    return json.dumps(text, ensure_ascii=False)

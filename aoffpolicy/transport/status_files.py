"""The files of a run folder that say where its status stream is and let its owner read it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from aoffpolicy.errors import ConfigError
from aoffpolicy.transport.address import Address
from aoffpolicy.transport.security import KeyPair, read_key_file, write_key_file, z85_key
from aoffpolicy.transport.subscriber import StatusSubscriber

STATUS_FILE = "status.json"
KEY_FILE = "status.key"


class _StatusFile(msgspec.Struct, frozen=True):
    address: str
    server_public_key: str
    """Empty without CURVE."""
    run_id: str


def write_status_files(
    run_dir: Path, address: Address, *, server_public: bytes | None, reader: KeyPair | None, run_id: str
) -> None:
    """Leave in a run folder what a reader needs: `status.json`, and with CURVE `status.key` (mode 0600)."""
    if server_public is not None and reader is not None:
        write_key_file(run_dir / KEY_FILE, reader, server_public)
    else:
        (run_dir / KEY_FILE).unlink(missing_ok=True)
    content = _StatusFile(str(address), (server_public or b"").decode(), run_id)
    (run_dir / STATUS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")


def subscriber_for(
    where: str | Path,
    key_file: Path | None = None,
    *,
    timeout_s: float | None = None,
    reconnect_s: float = 0.0,
) -> StatusSubscriber:
    """A subscriber for a run folder or for an address.

    Args:
        where: A run folder, or `host:port`.
        key_file: The run's `status.key`; None takes the one in the folder, and no CURVE for an address.
        timeout_s: Longest silence before an iteration gives up; None waits for ever.
        reconnect_s: How long a lost connection may take to come back.

    Raises:
        ConfigError: It is neither a folder nor an address, or a file in the folder cannot be read.
    """
    folder = Path(where)
    if not folder.is_dir():
        if not (folder.exists() or ":" in str(where)):
            raise ConfigError([f"{where}: neither a run folder nor an address such as 127.0.0.1:5555"])
        keys = read_key_file(key_file) if key_file is not None else (None, None)
        return StatusSubscriber(
            Address.parse(str(where)), key=keys[0], server_key=keys[1], timeout_s=timeout_s, reconnect_s=reconnect_s
        )
    status = _read_status_file(folder / STATUS_FILE)
    address = Address.parse(status.address)
    if not status.server_public_key:
        return StatusSubscriber(address, timeout_s=timeout_s, reconnect_s=reconnect_s)
    key, _ = read_key_file(key_file or folder / KEY_FILE)
    server_key = z85_key(status.server_public_key)
    return StatusSubscriber(address, key=key, server_key=server_key, timeout_s=timeout_s, reconnect_s=reconnect_s)


def _read_status_file(path: Path) -> _StatusFile:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_StatusFile)
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror}); has a run started in this folder?"]) from error
    except msgspec.MsgspecError as error:
        raise ConfigError([f"{path}: this is not a status file: {error}"]) from error

"""CURVE: key pairs, the sockets that use them, and the gate that lets only listed keys in.

libzmq encrypts and proves that a client holds its secret key, and asks a ZAP handler of its context (RFC 27) whether
the public key may come in. Each server has its own context, so that two in one process do not share a gate.
"""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio
from zmq.utils import z85

from aoffpolicy.errors import ConfigError

logger = logging.getLogger(__name__)
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"aoffpolicy"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, both as 40 bytes of Z85 text. The secret never shows in a repr."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> Self:
        return cls(*zmq.curve_keypair())


def secure_server(socket: zmq.Socket[Any], keys: KeyPair) -> None:
    """Make a socket a CURVE server: the `Authenticator` of its context lets clients in; without one nobody comes."""
    socket.curve_server = True
    socket.curve_secretkey = keys.secret
    socket.zap_domain = _ZAP_DOMAIN
    socket.zap_enforce_domain = True


def secure_client(socket: zmq.Socket[Any], keys: KeyPair, server_key: bytes) -> None:
    """Make a socket a CURVE client that talks to the holder of `server_key` only."""
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    socket.curve_serverkey = server_key


class Authenticator:
    """The ZAP handler of one context: admits the public keys in `admitted`, refuses and counts all others.

    A message from an admitted client carries its public key (Z85 text) as the property "User-Id".
    """

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.admitted: set[bytes] = set()
        """Public keys let in, as Z85; change it at any time."""
        self.refused = 0
        """Handshakes turned away."""
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(_ZAP_ENDPOINT)

    async def run(self) -> None:
        """Answer libzmq's questions until cancelled."""
        while True:
            caller, _, *request = await self._socket.recv_multipart()
            version, request_id, *_ = request
            user = z85.encode(request[6]) if self._is_curve(request) else b""
            if user in self.admitted:
                verdict = [b"200", b"OK", user, b""]
            else:
                self.refused += 1
                logger.warning(
                    "refused a connection from %s: its key is not listed", request[3].decode(errors="replace")
                )
                verdict = [b"400", b"this key is not listed", b"", b""]
            await self._socket.send_multipart([caller, b"", version, request_id, *verdict])

    def close(self) -> None:
        self._socket.close()

    @staticmethod
    def _is_curve(request: list[bytes]) -> bool:
        return len(request) == 7 and request[5] == b"CURVE" and len(request[6]) == 32


class _KeyFile(msgspec.Struct, frozen=True):
    public: str
    secret: str
    server_public: str


def write_key_file(path: Path, keys: KeyPair, server_public: bytes) -> None:
    """Write a client's key pair and the server's public key, readable by this user only, atomically."""
    content = _KeyFile(keys.public.decode(), keys.secret.decode(), server_public.decode())
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # created with mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(content) + b"\n")
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_key_file(path: Path) -> tuple[KeyPair, bytes]:
    """What `write_key_file` wrote: the client's key pair and the server's public key.

    Raises:
        ConfigError: The file is missing, not readable for this user, or holds no keys.
    """
    try:
        content = msgspec.json.decode(path.read_bytes(), type=_KeyFile)
        keys = [z85_key(text) for text in (content.public, content.secret, content.server_public)]
    except OSError as error:
        raise ConfigError([f"{path}: the key cannot be read ({error.strerror})"]) from error
    except (msgspec.MsgspecError, ValueError):
        # The cause would quote the file's content, which is a secret.
        raise ConfigError([f"{path}: this is not a key file"]) from None
    return KeyPair(keys[0], keys[1]), keys[2]


def z85_key(text: str) -> bytes:
    """A key in Z85 text, checked.

    Raises:
        ValueError: The text is not 40 characters of Z85.
    """
    key = text.encode("ascii")
    if len(key) != 40:
        raise ValueError("a key has 40 characters")
    try:
        z85.decode(key)
    except KeyError:
        raise ValueError("a key is Z85 text") from None
    return key

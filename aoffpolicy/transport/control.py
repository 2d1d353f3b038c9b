"""The control plane's public names: calls from one controller to its workers over ZeroMQ ROUTER / DEALER.

Read `wire` for what travels, `control_server` and `roster` for the controller's end, `control_client` and `pulse` for
the worker's.
"""

from __future__ import annotations

from aoffpolicy.transport.control_client import ControlClient
from aoffpolicy.transport.control_server import ControlServer
from aoffpolicy.transport.wire import Hello, PeerId

__all__ = ["ControlClient", "ControlServer", "Hello", "PeerId"]

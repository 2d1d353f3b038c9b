"""A Prometheus endpoint: the newest value of every metric as a gauge `aoffpolicy_<metric>`, labelled with the run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from aoffpolicy.config import Config
from aoffpolicy.errors import ConfigError
from aoffpolicy.sinks import Row, numbers
from aoffpolicy.transport.address import Address, resolve


class Prometheus:
    def __init__(self, config: Config, folder: Path) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._run = config.run.name
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        wanted = Address.parse(config.metrics.prometheus_address or config.control.host, default_port=0)
        host = resolve(wanted.host)[0]
        try:
            self._server, self._thread = start_http_server(wanted.port, host, self._registry)
        except OSError as error:
            raise ConfigError([f"metrics.prometheus_address: cannot bind {wanted}: {error}"]) from error
        self.address = Address(host, self._server.server_port)

    @property
    def place(self) -> str:
        return f"http://{self.address}/metrics"

    def write(self, step: int, row: Row) -> None:
        for key, value in {**numbers(row), "step": step}.items():
            self._gauge(key).labels(run=self._run).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, key: str) -> Any:
        from prometheus_client import Gauge

        name = "aoffpolicy_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, f"{key} of the newest step", ["run"], registry=self._registry)
        return self._gauges[name]

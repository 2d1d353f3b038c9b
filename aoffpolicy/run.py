"""One run, from empty processes to final weights: start the roles, form the weight group, drive the scheduler."""

from __future__ import annotations

import logging
import secrets
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
from rich.console import Console

from aoffpolicy import algorithms
from aoffpolicy.child import Bootstrap
from aoffpolicy.config import Config
from aoffpolicy.console import StepPrinter
from aoffpolicy.controller import RemoteRollout, RemoteTrainer, RemoteWeightSync, Shards, call_all
from aoffpolicy.data.prompts import build_eval_prompts, build_prompts, load_tokenizer
from aoffpolicy.errors import RoleError
from aoffpolicy.plan import PlannedProcess
from aoffpolicy.records import StepRecord, verdict
from aoffpolicy.run_folder import RunFolder
from aoffpolicy.scheduler import Scheduler, SchedulerSettings
from aoffpolicy.supervisor import Supervisor
from aoffpolicy.timeline import Timeline
from aoffpolicy.trainer.checkpoint import latest
from aoffpolicy.transport.control import ControlServer, PeerId
from aoffpolicy.transport.events import StatusPublisher
from aoffpolicy.transport.messages import Start, Started, Stop
from aoffpolicy.transport.rendezvous import Coordinator, RendezvousStore
from aoffpolicy.transport.security import KeyPair

logger = logging.getLogger(__name__)

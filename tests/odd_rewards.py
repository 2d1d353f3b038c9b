"""Reward functions that misbehave when a completion asks them to: the completion's first word says how."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from aoffpolicy.data.rows import Row

VALUES = {"none": None, "nan": float("nan"), "inf": float("inf"), "text": "1.0", "numpy": np.float32(0.5)}


def obey(completion: str, row: Row) -> Any:
    order, _, rest = completion.partition(" ")
    match order:
        case "hang":
            while True:
                time.sleep(1)
        case "sleep":
            time.sleep(float(rest))
        case "raise":
            raise LookupError(rest)
        case "exit":
            sys.exit(3)
        case "_exit":
            os._exit(7)
        case "segfault":
            ctypes.string_at(0)
        case "print":
            print("noise " * 1000, flush=True)
            os.write(1, b"\x00\x00\x00\x01more noise")
        case "read":
            return float(len(sys.stdin.read()))
        case "orphan":
            child = subprocess.Popen(["sleep", "60"])
            Path(rest).write_text(str(child.pid))
            time.sleep(60)
        case "return":
            return {"none": None, "nan": float("nan"), "inf": float("inf"), "text": "1.0", "numpy": np.float32(0.5)}[
                rest
            ]
        case "pid":
            return os.getpid()
        case "torch":
            return float("torch" in sys.modules)
        case "row":
            return float(row["answer"])
    return 1.0


async def obey_async(completion: str, row: Row) -> Any:
    order, _, rest = completion.partition(" ")
    if order == "await":
        await asyncio.sleep(float(rest))
        return 1.0
    return obey(completion, row)


def takes_one(completion: str) -> float:
    return 1.0


not_a_function = 3

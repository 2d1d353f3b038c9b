"""What vLLM runs in every one of its processes, by the entry point group `vllm.general_plugins`."""

from __future__ import annotations

import functools
import multiprocessing
import os

BACKEND = "aoffpolicy"
"""Name of our weight transfer engine in vLLM, and of the entry point."""
ENTRY_POINTS = "vllm.general_plugins"
OWNER = "AOFFPOLICY_VLLM_OWNER"
"""Set by the rollout worker to its process id: the vLLM processes below it are ours."""


@functools.cache  # vLLM may call it more than once in a process
def register() -> None:
    """Make our weight transfer engine known to vLLM, and tie engines of ours to the life of their parent.

    An engine that somebody else started is left alone.
    """
    if OWNER not in os.environ:
        return
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from aoffpolicy.child import die_with_parent

    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)
    WeightTransferEngineFactory.register_engine(BACKEND, "aoffpolicy.rollout.vllm.transfer", "TransferEngine")

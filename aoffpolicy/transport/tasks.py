"""Background tasks that live exactly as long as a block."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup


@asynccontextmanager
async def background_tasks() -> AsyncIterator[TaskGroup]:
    """A task group whose tasks serve the block and are cancelled when it ends.

    A task that fails cancels the block. Either way the first error comes out as itself, not wrapped in a group: an
    object that merely has tasks inside must not change the exceptions of the code around it.
    """
    first: BaseException | None = None
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        first = group.exceptions[0]
    if first is not None:
        raise first

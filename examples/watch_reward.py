"""Prints the mean reward of every step of a run, wherever that runs: `python examples/watch_reward.py RUN`."""

import sys

from aoffpolicy.transport.events import RunEvent, StepEvent, subscriber_for

with subscriber_for(sys.argv[1], timeout_s=30) as subscriber:  # a folder or host:port; a run speaks every second
    for event in subscriber.blocking():
        if isinstance(event, StepEvent):
            print(event.step, event.metrics["reward_mean"], flush=True)
        elif isinstance(event, RunEvent) and event.state in ("finished", "failed", "interrupted"):
            break

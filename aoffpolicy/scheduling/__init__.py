"""The parts that `aoffpolicy/scheduler.py` is put together from, each small enough to be read at a glance."""

"""Watching a run from outside: `python -m aoffpolicy.status [ADDRESS | RUN_FOLDER]`.

`picture` gathers what is known from events or from a run's folder, `screen` draws it, `why` explains it.
"""

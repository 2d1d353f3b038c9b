"""One self-contained HTML page about a run: `python -m aoffpolicy.report RUN_FOLDER`.

`aoffpolicy.recorded` reads the run folder, `svg` and `gantt` draw, `page` puts everything together.
"""

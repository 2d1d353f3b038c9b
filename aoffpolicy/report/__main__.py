"""`python -m aoffpolicy.report RUN_FOLDER`: write the page about a run, finished or not."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from aoffpolicy.errors import AoffpolicyError
from aoffpolicy.recorded import read_run
from aoffpolicy.report.page import render

EXIT_FAILED = 1
SLOWEST = 8
"""Groups shown with their texts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and say where it is; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m aoffpolicy.report", description="Make one self-contained HTML page about a run."
    )
    parser.add_argument("run", metavar="RUN_FOLDER", type=Path)
    parser.add_argument("--output", metavar="FILE", type=Path, help="default: report.html in the run's folder")
    options = parser.parse_args(argv)
    output = options.output or options.run / "report.html"
    try:
        page = render(read_run(options.run, SLOWEST))
        output.write_text(page, encoding="utf-8")
    except (AoffpolicyError, OSError) as error:
        print(f"aoffpolicy.report: {error}", file=sys.stderr)
        return EXIT_FAILED
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())

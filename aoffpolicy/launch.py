"""`python -m aoffpolicy.launch CONFIG.toml [--section.key value ...]`: run one-step-off-policy training."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from aoffpolicy import algorithms
from aoffpolicy import config as configuration
from aoffpolicy.config import Config
from aoffpolicy.errors import AoffpolicyError, ConfigError, RoleError
from aoffpolicy.plan import PlannedProcess, make_plan, with_weights_backend
from aoffpolicy.run_folder import RunFolder

EXIT_OK, EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 finished, 1 failed, 2 bad config, 130 interrupted."""
    arguments, overrides = _parser().parse_known_args(argv)
    if arguments.help:
        _print_help()
        return EXIT_OK
    if arguments.config is None:
        _parser().print_usage(sys.stderr)
        return EXIT_CONFIG
    try:
        config = configuration.load(arguments.config, overrides)
        algorithms.build(config)  # an algorithm knows which of its keys contradict each other
        plan = make_plan(config)
        config = with_weights_backend(config, plan)
        if arguments.dry_run:
            _print_dry_run(config, plan)
            return EXIT_OK
        return _run(config, plan, resume=arguments.resume == "auto")
    except ConfigError as error:
        print("\n".join(error.faults), file=sys.stderr)
        return EXIT_CONFIG


def _run(config: Config, plan: Sequence[PlannedProcess], *, resume: bool) -> int:
    import anyio

    from aoffpolicy.run import Run  # torch and transformers come with it

    console = Console(soft_wrap=True)
    with RunFolder(config, resume=resume) as folder:
        logging.basicConfig(
            filename=folder.logs / "launch.log",
            level=logging.INFO,
            format="%(asctime)s %(levelname)s launch %(name)s: %(message)s",
            force=True,
        )
        if folder.moved_to:
            console.print(f"an earlier run was in {folder.path}; it is now {folder.moved_to}")
        run = Run(config, plan, folder, console, resume=resume)
        try:
            interrupted = anyio.run(run.run, backend_options={"use_uvloop": True})
        except AoffpolicyError as error:
            return _failed(error)
        except Exception as error:
            logging.getLogger(__name__).exception("the run failed")
            return _failed(error)
    return EXIT_INTERRUPTED if interrupted else EXIT_OK


def _failed(error: Exception) -> int:
    """Print the remote traceback if there is one, and the first cause as the last line."""
    if isinstance(error, ConfigError):
        raise error
    if isinstance(error, RoleError) and error.remote_traceback:
        print(error.remote_traceback.rstrip(), file=sys.stderr)
    print(f"aoffpolicy: {type(error).__name__}: {error}", file=sys.stderr)
    return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m aoffpolicy.launch",
        usage="%(prog)s CONFIG.toml [--section.key value ...] [--dry-run] [--resume auto] [--help]",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("config", nargs="?", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--resume", choices=["auto", "never"], default="never")
    parser.add_argument("-h", "--help", action="store_true")
    return parser


def _print_help() -> None:
    _parser().print_usage()
    print("\n--dry-run        print the resolved config and the plan of processes, start nothing")
    print("--resume auto    go on from the newest checkpoint in the run's folder, if there is one")
    print("\nEvery key of the config, as --section.key VALUE or in the TOML file:\n")
    rows = [(f"--{key}", default, meaning) for key, default, meaning in configuration.describe()]
    width = max(len(key) for key, _, _ in rows)
    for key, default, meaning in rows:
        print(f"{key:<{width}}  {meaning} [{default}]")


def _print_dry_run(config: Config, plan: Sequence[PlannedProcess]) -> None:
    print(configuration.to_toml(config))
    table = Table(title="processes", title_justify="left")
    for column in ("role", "rank", "device", "threads", "address"):
        table.add_column(column)
    control = f"tcp, {config.control.host}, free port"
    table.add_row("launch", "0", "cpu", "1", f"binds {control}; status {config.status.address or control}")
    for process in plan:
        table.add_row(process.role, str(process.rank), process.device, str(process.threads), f"connects {control}")
    Console(width=120).print(table)


def command() -> None:
    """`main` as a command: never returns, so that nothing is printed after the run's last line.

    While Python shuts down, libraries of other packages report leaks to standard error (nanobind in triton does).
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    command()

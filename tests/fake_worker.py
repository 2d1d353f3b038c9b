"""A child that obeys the environment variable FAKE_WORKER instead of a controller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from aoffpolicy.child import Bootstrap, die_with_parent


def main() -> None:
    bootstrap = Bootstrap.from_bytes(sys.stdin.buffer.read())
    die_with_parent(bootstrap.parent_pid)
    print(f"{bootstrap.role} {bootstrap.rank} here", flush=True)
    match os.environ["FAKE_WORKER"]:
        case "exit":
            print("about to leave", flush=True)
            sys.exit(7)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            print("ready", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()

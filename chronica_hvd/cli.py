"""The command ``chronica-hvd``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from chronica_hvd import horovod_build


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="chronica-hvd", description="Balanced Horovod training.")
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser(
        "build-horovod",
        help="build Horovod for the installed torch and install it; the wheel is kept in a user cache",
        description="Build Horovod for the installed torch and install it; HOROVOD_* variables choose its options.",
    )
    build.add_argument(
        "--cache", type=Path, help="folder of finished wheels (default: chronica-hvd in the user's cache)"
    )
    options = parser.parse_args(arguments)
    try:
        print(f"installed {horovod_build.install(options.cache)}")
    except horovod_build.BuildError as error:
        print(f"chronica-hvd: {error}", file=sys.stderr)
        return 1
    return 0

"""Turn a job's `main(job)` into a command that parses flags and reports an error as one line and an exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import select
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from raytf import _process
from raytf.config import exit_codes, flag_parsing, program
from raytf.config.terminal_text import printable, visible
from raytf.config.train_config import TrainConfig
from raytf.errors import JobError, RaytfError, one_line

EXIT_FAILED = exit_codes.FAILED.code
EXIT_REFUSED = exit_codes.REFUSED.code
#: The environment variable with a file name: the command writes its flags there as JSON, and does nothing else.
DESCRIBE = "RAYTF_DESCRIBE_TO"
#: The same command may succeed later (EX_TEMPFAIL of sysexits.h).
EXIT_AGAIN = exit_codes.AGAIN.code


def cli(main: Callable[[Any], object], args: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Parse the flags of `main`'s one dataclass argument, run it, and exit the process.

    `raytf.config.exit_codes` lists the exit codes. A `RaytfError` becomes one line on standard error, preceded by its
    traceback if the job's own code raised it; any other exception is a defect and keeps its traceback. SIGTERM and
    SIGHUP stop the process as Ctrl-C does, so that it cleans up.

    Args:
        main: a function with one annotated argument, a dataclass.
        args: the command line without the program's name; `sys.argv[1:]` by default.
        prog: the name of the command in `--help`; the file by default.
    """
    printable()
    argv = _gpu_switches(sys.argv[1:] if args is None else args)
    prog = prog or f"python {sys.argv[0]}"
    asked = os.environ.get(DESCRIBE)
    called = _checked(main) if asked is None else _telling(main, asked)
    ending = _process.EndingSignal()
    try:
        try:
            _show_help_or_refuse(main, argv, prog)
            with _process.as_interrupts(ending):
                tyro.cli(called, prog=prog, args=argv, config=(tyro.conf.OmitArgPrefixes,))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt as error:
        word = "interrupted" if ending.number is None else f"told to stop ({ending.number.name})"
        _leave(visible(error) or f"{word}; {program.from_last_checkpoint()}.", ending.code)
    except BrokenPipeError:
        _unless_nobody_reads()
        raise
    except UnicodeEncodeError as error:
        # A name on the command line is not in this machine's encoding. No library accepts it.
        if "surrogates" not in error.reason:
            raise
        _leave(f"error: {visible(error.object)!s:.500} is not text in UTF-8. Choose another name.", EXIT_REFUSED)
    except RaytfError as error:
        trace = f"{visible(error.traceback, lines=True)}\n" if isinstance(error, JobError) else ""
        _leave(f"{trace}error: {visible(one_line(error))}", exit_codes.of_error(error).code)


def _show_help_or_refuse(main: Callable[[Any], object], argv: Sequence[str], prog: str) -> None:
    """Show the help and exit, or report an error in the command line and exit."""
    groups = flag_parsing.of_command(main)
    if not groups:  # subcommands
        return
    own = argv[: argv.index("--")] if "--" in argv else argv
    if {"-h", "--help", "--help-all"} & set(own):
        print(flag_parsing.page(prog, groups, "--help-all" in own, shutil.get_terminal_size().columns), flush=True)
        sys.exit(0)
    problem = flag_parsing.wrong(groups, own)
    if problem:
        print(f"error: {visible(problem)}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)


def _checked(main: Callable[[Any], object]) -> Callable[[Any], object]:
    """Wrap `main` so that its settings are checked before it is called."""

    @functools.wraps(main)
    def check(*args: Any, **named: Any) -> object:
        for job in (*args, *named.values()):
            for field in dataclasses.fields(job) if dataclasses.is_dataclass(job) else ():
                value = getattr(job, field.name)
                if isinstance(value, TrainConfig):
                    value.check()
        return main(*args, **named)

    return check


def _unless_nobody_reads() -> None:
    """Exit quietly if nobody reads standard output any more, as after `| head`."""
    out = sys.stdout.fileno()
    poll = select.poll()
    poll.register(out, 0)
    if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), out)  # the interpreter flushes once more when it exits
        sys.exit(exit_codes.UNREAD.code)


def _telling(main: Callable[[Any], object], path: str) -> Callable[[Any], object]:
    """Return a replacement for `main` that writes the values of all flags to a file."""

    @functools.wraps(main)
    def tell(*args: Any, **named: Any) -> None:
        (job,) = (*args, *named.values())
        with open(path, "w") as out:
            json.dump(_values(job), out, default=str)

    return tell


def _values(job: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(job):
        value = getattr(job, field.name)
        values |= _values(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return values


def _gpu_switches(args: Sequence[str]) -> list[str]:
    # tyro has no on/off switch for a setting that can also be None, such as --use-gpu.
    switches = {"--use-gpu": "True", "--no-use-gpu": "False"}
    out: list[str] = []
    for i, arg in enumerate(args):
        if arg == "--":
            return out + list(args[i:])  # the rest belongs to another command
        follows = args[i + 1] if i + 1 < len(args) else ""
        if arg in switches and follows not in ("True", "False", "None"):
            out += ["--use-gpu", switches[arg]]
        else:
            out.append(arg)
    return out


def _leave(message: str, code: int) -> None:
    with contextlib.suppress(OSError):  # the terminal was closed
        print(message, file=sys.stderr, flush=True)
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    # A storage call without an answer leaves a thread that an interpreter shutdown would wait for forever.
    os._exit(code)

"""Turn a job's `main(job)` into a command: flags in, one clear line and an exit code out."""

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
#: Names a file in the environment: the command writes what its flags say there as JSON, and does nothing else.
DESCRIBE = "RAYTF_DESCRIBE_TO"
#: The same command may do what it should when it is started again in a while (EX_TEMPFAIL of sysexits.h).
EXIT_AGAIN = exit_codes.AGAIN.code


def cli(main: Callable[[Any], object], args: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Parse the flags of `main`'s one dataclass argument, run it, and exit the process.

    The exit codes are those of `raytf.config.exit_codes`. A `RaytfError` becomes one line on standard error, after its
    traceback where the job's own code raised it; anything else is a defect and keeps its traceback. SIGTERM and SIGHUP
    end the process as Ctrl-C does, so that what was started is cleaned up.

    Args:
        main: a function with one annotated argument, a dataclass.
        args: the command line without the program's name; `sys.argv[1:]` by default.
        prog: what `--help` calls the command; the file by default.
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
        # A name on the command line that is not of this machine's encoding, which no library takes.
        if "surrogates" not in error.reason:
            raise
        _leave(f"error: {visible(error.object)!s:.500} is not text in UTF-8. Choose another name.", EXIT_REFUSED)
    except RaytfError as error:
        trace = f"{visible(error.traceback, lines=True)}\n" if isinstance(error, JobError) else ""
        _leave(f"{trace}error: {visible(one_line(error))}", exit_codes.of_error(error).code)


def _show_help_or_refuse(main: Callable[[Any], object], argv: Sequence[str], prog: str) -> None:
    """Show the help and exit, or say in one line what is wrong with the command line."""
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
    """Wrap `main` so that it is not called with settings that no run can have."""

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
        os.dup2(os.open(os.devnull, os.O_WRONLY), out)  # the interpreter flushes once more when it ends
        sys.exit(exit_codes.UNREAD.code)


def _telling(main: Callable[[Any], object], path: str) -> Callable[[Any], object]:
    """Return a function to call instead of `main`, which writes the values of all flags to a file."""

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
    # tyro has no on/off switch for a setting that may also be left open, and that is what --use-gpu is.
    switches = {"--use-gpu": "True", "--no-use-gpu": "False"}
    out: list[str] = []
    for i, arg in enumerate(args):
        if arg == "--":
            return out + list(args[i:])  # what follows is another command's
        follows = args[i + 1] if i + 1 < len(args) else ""
        if arg in switches and follows not in ("True", "False", "None"):
            out += ["--use-gpu", switches[arg]]
        else:
            out.append(arg)
    return out


def _leave(message: str, code: int) -> None:
    with contextlib.suppress(OSError):  # of a terminal that was closed
        print(message, file=sys.stderr, flush=True)
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    # A storage call that an endpoint never answers leaves a thread that no interpreter shutdown can join.
    os._exit(code)

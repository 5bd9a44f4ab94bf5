"""The `fidelta` command."""

import argparse
import contextlib
import json
import re
import sys

EXIT_CODES = "exit code: 0 healthy, 1 findings, 2 could not run, 130 interrupted"


def main(argv=None):
    """Runs the command line; returns the exit code."""
    try:
        arguments = _parser().parse_args(argv)
        return arguments.run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone: `fidelta doctor ... | head`
        sys.stderr.close()
        return 1
    except ImportError as error:
        print(f"fidelta: {error}", file=sys.stderr)
        return 2


def _parser():
    from . import __version__

    parser = argparse.ArgumentParser(prog="fidelta", description="Faithful kernels for hybrid linear-attention language models, and "
                                     "the tool that tells why such a model prints gibberish.")
    parser.add_argument("--version", action="version", version=f"fidelta {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="examine a checkpoint and name what is wrong with it", epilog=EXIT_CODES,
                                 description="Reads a checkpoint's config and tensors, runs prompts through fidelta's own kernels, "
                                 "and names what is wrong: the tensor, the number and the mend.")
    doctor.add_argument("path", metavar="PATH", help="the checkpoint's folder (config.json, *.safetensors, tokenizer.json)")
    doctor.add_argument("--prompt", action="append", metavar="TEXT", help="a text to predict from; may be given several times (default: the five built-in texts, on which the judgement rests)")
    doctor.add_argument("--json", metavar="FILE", help="also write everything as JSON; - writes it to stdout instead of the report")
    doctor.add_argument("--max-memory", type=_size, metavar="SIZE", help="refuse to start when more is needed, such as 4G or 512M")
    doctor.add_argument("--max-new-tokens", type=_count, default=32, metavar="N", help="length of the greedy continuation (default 32)")
    doctor.add_argument("--threads", type=_threads, default=0, metavar="N", help="threads of the kernels (default: all cores)")
    doctor.add_argument("--all", action="store_true", help="try every other reading of the weights: the rarer orders of q, k and v too, also beside other errors and in a large model")
    doctor.set_defaults(run=_doctor)
    return parser


def _count(text):
    if not re.fullmatch(r"\d{1,6}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _threads(text):
    if not 1 <= _count(text) <= 256:
        raise argparse.ArgumentTypeError(f"{text} threads; expected 1 .. 256")
    return int(text)


def _size(text):
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text, re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4G or 512M")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def _doctor(arguments):
    from rich.console import Console

    from . import set_num_threads
    from .doctor import CannotRun, examine, render

    if arguments.threads:
        set_num_threads(arguments.threads)
    to_file = arguments.json not in (None, "-")
    try:  # the file is opened first: that it cannot be written must not be learnt after the work
        with open(arguments.json, "w", encoding="utf-8") if to_file else contextlib.nullcontext() as file:
            with _progress() as progress:
                examination = examine(arguments.path, prompts=arguments.prompt, max_new_tokens=arguments.max_new_tokens,
                                      max_memory=arguments.max_memory, progress=progress, thorough=arguments.all)
            written = json.dumps(_plain(examination.as_dict()), indent=2, allow_nan=False)
            if to_file:
                file.write(written + "\n")
    except (CannotRun, OSError) as error:
        print(f"fidelta doctor: {error}", file=sys.stderr)
        return 2
    if arguments.json == "-":
        print(written)
    else:
        console = Console(soft_wrap=False) if sys.stdout.isatty() else Console(width=120)
        console.print(render(examination))
    return examination.exit_code


def _plain(value):
    """JSON has no NaN or Inf: they become strings."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


@contextlib.contextmanager
def _progress():
    """A progress bar on stderr while it is a terminal, else none."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(TextColumn("{task.description:14}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeRemainingColumn(),
                   console=Console(stderr=True), transient=True)

    class Stages:
        task = None

        def stage(self, name, total):
            self.task = bar.add_task(name, total=total or None)

        def step(self, n=1):
            bar.advance(self.task, n)

    with bar:
        yield Stages()


if __name__ == "__main__":
    sys.exit(main())

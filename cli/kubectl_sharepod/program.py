"""`kubectl sharepod`: parses the arguments, runs the command and sets the exit status.

Exit status: 0 done; 1 an error, a problem that `doctor` found, or a workload without a share in `why`; 2 wrong
arguments; 3 not allowed; 130 Ctrl-C, except where it is the usual end of the command.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kubectl_sharepod.kubectl import ForbiddenError, Kubectl, KubectlError, UsageError
from kubectl_sharepod.output import EXIT_ERROR, EXIT_FORBIDDEN, EXIT_USAGE, Format, Page, Screen, drawn, fitting, show

_REFRESH_S = 2.0
_MONTH = re.compile(r"[0-9]{4}-(0[1-9]|1[0-2])")
_SECONDS = re.compile(r"[0-9]{1,6}([.][0-9]{1,3})?s?")
_OBJECTS = 1_000_000
"""Number of new objects after which garbage is collected. The default, 700, takes a fifth of the time of a large
cluster's views, which have no cycles."""
OF_KUBECTL = ("logs", "exec", "port-forward")
"""Commands that kubectl itself executes, after the name was replaced by the Pod's."""
_CONNECTION = (
    *("context", "kubeconfig", "cluster", "user", "as", "as-uid", "server", "token", "tls-server-name"),
    *("certificate-authority", "client-certificate", "client-key"),
)
"""Flags with a value that the plugin passes to kubectl. It also passes `--as-group`, which may be repeated, and
`--insecure-skip-tls-verify`, which has no value."""
_NAMESPACE = ("-n", "--namespace")
_TAKE_A_VALUE = (
    *("-c", "--container", "--since", "--since-time", "--tail", "--limit-bytes", "--max-log-requests"),
    *("--pod-running-timeout", "--address"),
)
"""Flags of `kubectl logs`, `exec` and `port-forward` that take the next word as their value."""


def arguments() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="kubectl sharepod",
        description="Tenants of the GPUs, free shares, and the reasons of waiting Pods.",
        epilog="exit status: 0 done, 1 error or problem found, 2 wrong arguments, 3 not allowed, 130 Ctrl-C",
    )
    connection = argparse.ArgumentParser(add_help=False)
    add_connection(connection)
    add_connection(parser)
    parser.add_argument(*_NAMESPACE, dest="namespace_before", help=argparse.SUPPRESS)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(*_NAMESPACE, help="namespace (default: that of the context)")
    listed = argparse.ArgumentParser(add_help=False, parents=[shared])
    listed.add_argument("-A", "--all-namespaces", action="store_true", help="all namespaces")
    formats = argparse.ArgumentParser(add_help=False)
    formats.add_argument(
        "-o", "--output", choices=[str(one) for one in Format], default=Format.TABLE, metavar="FORMAT",
        help="table, wide, json, yaml or name",
    )  # fmt: skip
    found = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, help_text: str, example: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return found.add_parser(
            name,
            help=help_text,
            description=help_text,
            epilog=f"example: kubectl sharepod {example}",
            parents=[connection, *parents],
        )

    command = add("top", "workloads: asked, got, progress, memory, wait", "top -A --watch", listed, formats)
    command.add_argument("-w", "--watch", action="store_true", help="refresh every two seconds, until Ctrl-C")
    add("free", "free GPU time and memory, by model and pool", "free", formats)
    add("gpus", "all GPUs: tenants, free time and memory", "gpus -o wide", formats)
    command = add("page", "the fleet in a browser, until Ctrl-C", "page", listed)
    command.add_argument("--port", type=port_of, default=0, help="of this machine (default: a free one)")
    command = add("who", "tenants of one GPU", "who gpu-node-0:1", formats)
    command.add_argument("gpu", help="NODE:INDEX, or the UUID or its beginning")
    command = add("trace", "what a GPU did in the last seconds, for Perfetto", "trace gpu-node-0:1 --for 10s", formats)
    command.add_argument("gpu", help="NODE:INDEX, or the UUID or its beginning")
    command.add_argument(
        "--for", dest="length", type=seconds, default=10.0, metavar="TIME", help="such as 5s (default: 10s)"
    )
    command.add_argument("--file", type=Path, help="default: sharepod-trace-NODE-INDEX.json")
    for name, help_text in (
        ("cordon", "let no new tenant on a GPU; its tenants stay"),
        ("uncordon", "let tenants on a GPU again"),
        ("drain", "cordon a GPU and evict what may be moved and has room elsewhere"),
    ):
        command = add(name, help_text, f"{name} gpu-node-0:1", formats)
        command.add_argument("gpu", help="NODE:INDEX, or the UUID or its beginning")
    command = add("why", "why a workload has no GPU, and the smallest change", "why pod/train", shared, formats)
    command.add_argument("name", help="NAME of a SharePod, pod/NAME or claim/NAME")
    command = add("bill", "GPU hours of namespaces in a month", "bill -A --month 2026-11", listed, formats)
    command.add_argument("--month", type=month_of, help="such as 2026-11 (default: the last with any)")
    add("budget", "budgets: used, left, and when they are spent", "budget -A", listed, formats)
    command = add("resize", "another share while it runs", "resize train --request 0.6", shared)
    command.add_argument("name", help="NAME of a SharePod, pod/NAME or claim/NAME")
    for name in ("request", "limit", "memory"):
        command.add_argument(f"--{name}", help=f"such as {'8Gi' if name == 'memory' else '0.4'}")
    for name, example in (("logs", "logs train -f"), ("exec", "exec train -- sh"), ("port-forward", "")):
        command = add(name, f"kubectl {name} of a SharePod's Pod", example or "port-forward web 8080:80", shared)
        command.add_argument("name", help="NAME of a SharePod, or pod/NAME")
        command.add_argument("rest", nargs=argparse.REMAINDER, help=f"arguments of kubectl {name}")
    command = add("explain", "meaning of a reason; without one: all", "explain NoRoom", formats)
    command.add_argument("reason", nargs="?")
    add("doctor", "what keeps SharePod from working", "doctor", formats)
    add("preflight", "what to know before the installation", "preflight", formats)
    command = add("support", "a bundle for a report, without users' secrets", "support --file bundle.tar.gz", shared)
    command.add_argument("--file", type=Path, help="default: sharepod-support-TIME.tar.gz")
    return parser


def month_of(given: str) -> str:
    """Return a month such as `2026-11` unchanged. Raise `ArgumentTypeError` for any other text."""
    if not _MONTH.fullmatch(given):
        raise argparse.ArgumentTypeError(f"{given!r} is no month; write one such as 2026-11")
    return given


def seconds(given: str) -> float:
    """Return the number of seconds in `10s` or `10`. Raise `ArgumentTypeError` for any other text."""
    if _SECONDS.fullmatch(given) is None or not float(given.removesuffix("s")):
        raise argparse.ArgumentTypeError(f"{given!r} is no number of seconds above 0; write one such as 10s")
    return float(given.removesuffix("s"))


def port_of(given: str) -> int:
    """Return a port number from its text; 0 stands for any free port. Raise `ArgumentTypeError`."""
    if not given.isdecimal() or not int(given[:6]) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{given!r} is no port; write a number from 0 to 65535")
    return int(given[:6])


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add kubectl's flags for the connection to a parser."""
    for name in _CONNECTION:
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--as-group", action="append", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    switch = "--insecure-skip-tls-verify"
    parser.add_argument(switch, action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def connection_of(asked: argparse.Namespace) -> tuple[str, ...]:
    """Return the given flags for the connection, in the form for kubectl."""
    given = vars(asked)
    flags = [(name, given.get(name.replace("-", "_"))) for name in _CONNECTION]
    flags += [("as-group", group) for group in given.get("as_group", ())]
    insecure = ["--insecure-skip-tls-verify"] if given.get("insecure_skip_tls_verify") else []
    return (*(f"--{name}={value}" for name, value in flags if value), *insecure)


def run(given: Sequence[str], *, program: str = "kubectl", to: Screen | None = None) -> int:
    """Run one command; return its exit status."""
    parser, given = arguments(), _name_first(given)
    asked = parser.parse_args(given)
    if asked.command in OF_KUBECTL:
        asked.rest = _own_flags(asked, _rest(given, asked.rest))
    if getattr(asked, "namespace", "") is None:
        asked.namespace = asked.namespace_before
    kubectl = Kubectl(connection_of(asked), program)
    try:
        with contextlib.closing(kubectl):
            return _executed(kubectl, asked, to)
    except ForbiddenError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FORBIDDEN
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KubectlError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR


def _executed(kubectl: Kubectl, asked: argparse.Namespace, to: Screen | None) -> int:
    """Run the command and show its page; return the exit status. Raise `KubectlError`."""
    kubeconfig = getattr(asked, "kubeconfig", None)
    if kubeconfig and not Path(kubeconfig).exists():
        raise UsageError(f"the kubeconfig {kubeconfig} does not exist")
    if asked.command != "explain":
        kubectl.start()
    from kubectl_sharepod.dispatch import command, pass_on  # here, while kubectl starts: this takes as long

    if asked.command in OF_KUBECTL:
        pass_on(kubectl, asked)
    if asked.command == "page":
        from kubectl_sharepod.page.server import scope_of, serve  # here, because the others need no HTTP server

        scope, note = scope_of(kubectl, asked.namespace, every=asked.all_namespaces)
        serve(scope, note, asked.port, _announce)
        return 0
    how = Format(getattr(asked, "output", Format.TABLE))
    watches = getattr(asked, "watch", False)
    if watches and how not in (Format.TABLE, Format.WIDE):
        raise UsageError(f"--watch shows tables; leave out --watch or -o {how}")
    read = command(kubectl, asked)
    page = read()
    if watches:
        _watch(read, page, to, wide=how is Format.WIDE)
    else:
        show(page, how, to or Screen.of_process())
    return page.status


def _announce(url: str) -> None:
    print(f"Open {url}\nOnly for you: the URL is the password. Ctrl-C ends the page.", flush=True)


def main() -> None:
    """Run the command in this process's arguments, and exit with its status."""
    gc.set_threshold(_OBJECTS)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # names in a cluster may not fit the terminal's encoding
    status: int | str | None = EXIT_ERROR
    try:
        status = _status_of(sys.argv[1:])
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's flush at exit would fail too
        status = EXIT_ERROR
        if not isinstance(error, BrokenPipeError):
            print(f"error: cannot write the output: {error.strerror}", file=sys.stderr)
    sys.exit(status)


def _status_of(given: Sequence[str]) -> int | str | None:
    try:
        return run(given)
    except SystemExit as end:  # raised by argparse, after --help or wrong arguments
        return end.code


def _name_first(given: Sequence[str]) -> Sequence[str]:
    """Move the flags between `logs`, `exec` or `port-forward` and the name to after the name, where argparse leaves
    them for kubectl: `logs -f train` becomes `logs train -f`."""
    at = _after_flags(given, 0)
    if at >= len(given) or given[at] not in OF_KUBECTL:
        return given
    name = _after_flags(given, at + 1)
    flags = given[at + 1 : name]
    if name >= len(given) or given[name] == "--" or {"-h", "--help"} & set(flags):
        return given
    return [*given[: at + 1], given[name], *flags, *given[name + 1 :]]


def _after_flags(words: Sequence[str], at: int) -> int:
    """Return the index of the first word, from index `at` on, that is neither a flag nor the value of a flag."""
    valued = {*_NAMESPACE, *_TAKE_A_VALUE, *(f"--{name}" for name in (*_CONNECTION, "as-group"))}
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        at += 2 if words[at] in valued else 1
    return at


def _rest(given: Sequence[str], rest: Sequence[str]) -> Sequence[str]:
    """Return the words after the name, with the `--` before them that argparse drops."""
    begin = len(given) - len(rest)
    return given[begin - 1 :] if rest and given[begin - 1] == "--" else rest


def _own_flags(asked: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """Read flags for namespace and connection that follow the name into `asked`. Return the other words, for
    kubectl."""
    end = rest.index("--") if "--" in rest else len(rest)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(*_NAMESPACE, default=argparse.SUPPRESS)
    add_connection(parser)
    _, left = parser.parse_known_args(rest[:end], asked)
    return [*left, *rest[end:]]


def _watch(read: Callable[[], Page], first: Page, to: Screen | None, *, wide: bool) -> None:
    """Show a page again every `_REFRESH_S` until Ctrl-C. If a read fails, show the error above the last page."""
    page, problem = first, ""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            screen = to or Screen.of_process()  # each time, because a terminal may change its size
            head = [time.strftime("%H:%M:%S"), *([f"error: {problem}; this is the last answer"] if problem else [])]
            lines = [*head, *page.notes, *drawn(page, screen, wide=wide)]
            print("\n".join(fitting(lines, screen)), file=screen.file, flush=True)
            time.sleep(_REFRESH_S)
            try:
                page, problem = read(), ""
            except KubectlError as error:
                problem = str(error)

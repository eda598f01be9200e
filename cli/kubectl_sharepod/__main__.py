"""Entry point of the plugin's programs. Ctrl-C ends them without a traceback, also while their modules are loaded.

This module is loaded before the guard, so it imports nothing but `sys`.
"""

import sys

EXIT_INTERRUPTED = 130
"""Exit status after Ctrl-C, as that of a program that SIGINT ends in a shell."""


def main() -> None:
    """Run the plugin, also as `python -m kubectl_sharepod`."""
    try:
        from kubectl_sharepod.program import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def complete() -> None:
    """Print the shell's completions."""
    try:
        from kubectl_sharepod.completion import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()

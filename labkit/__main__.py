"""`python3 -m labkit COMMAND`, from a fresh clone with nothing but Python and pip: the environment first, then the command.

Nothing is imported before the version of Python is known to serve, and nothing outside the standard library before the environment is.
"""

import sys

OLDEST = (3, 10)


def main(argv=None):
    """Runs one command and gives back its exit code: 0 done, 1 failed, 2 wrong usage, 130 stopped."""
    if sys.version_info < OLDEST:
        found = "{}.{}".format(*sys.version_info[:2])
        wanted = "{}.{}".format(*OLDEST)
        sys.stderr.write(f"labkit needs Python {wanted} or newer, and {sys.executable} is {found}; start it with a newer python3\n")
        return 2

    from labkit.cli.parser import parse, refuse
    from labkit.setup import bootstrap

    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(argv)
    try:
        bootstrap.ensure(args.extras, argv)
    except bootstrap.SetupError as error:
        return refuse(str(error), json=args.json, code=1)
    except KeyboardInterrupt:
        return refuse("stopped; the next start makes the environment anew", json=args.json, code=130)
    from labkit.cli.commands import act  # needs the environment

    return act(args)


if __name__ == "__main__":
    sys.exit(main())

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

    from labkit import bootstrap, cli

    argv = sys.argv[1:] if argv is None else list(argv)
    args = cli.parse(argv)
    try:
        bootstrap.ensure(args.extras, argv)
    except bootstrap.SetupError as error:
        return cli.refuse(str(error), json=args.json, code=1)
    except KeyboardInterrupt:
        return cli.refuse("stopped; the next start makes the environment anew", json=args.json, code=130)
    return cli.act(args)


if __name__ == "__main__":
    sys.exit(main())

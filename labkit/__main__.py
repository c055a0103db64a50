"""`python3 -m labkit COMMAND`: sets up the environment of a fresh clone, which needs only Python and pip, then runs the
command.

Nothing is imported before the version of Python is checked, and only the standard library before the environment is
ready.
"""

import sys

OLDEST = (3, 10)


def main(argv=None):
    """Runs one command and returns its exit code: 0 done, 1 failed, 2 wrong usage, 130 stopped."""
    if sys.version_info < OLDEST:
        found = "{}.{}".format(*sys.version_info[:2])
        wanted = "{}.{}".format(*OLDEST)
        sys.stderr.write(
            f"labkit needs Python {wanted} or newer, and {sys.executable} is {found}; start it with a newer python3\n"
        )
        return 2

    from labkit.cli.parser import parse, refuse
    from labkit.setup import environment

    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(argv)
    if args.command == "test" and "--gpu" in args.rest:
        session = environment.CLONE / "tests" / "gpu_session"
        if not session.is_dir():
            return refuse(
                f"{environment.CLONE} has no {session.name}; start it from a clone of the project", json=False, code=2
            )
        # it prepares the environment itself, as far as a bare machine allows
        environment.become([sys.executable, str(session), *(argument for argument in args.rest if argument != "--gpu")])
    try:
        environment.ensure(args.extras, argv)
    except environment.SetupError as error:
        return refuse(str(error), json=args.json, code=1)
    except KeyboardInterrupt:
        return refuse("interrupted; the next start sets up the environment again", json=args.json, code=130)
    from labkit.cli.commands import act  # needs the environment

    return act(args)


if __name__ == "__main__":
    sys.exit(main())

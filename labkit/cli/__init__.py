"""The command line: the parser, which needs only the standard library, and one thin function per command."""

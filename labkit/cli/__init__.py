"""The command line: the parser, for which the standard library is enough, and one thin function per command."""

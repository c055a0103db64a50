"""The command line: the parser, which needs only the standard library, and one thin function per command.

The parser imports the tables and the Spec only; no other package imports the command line.

`cli/parser.py` parses with the standard library only; `cli/commands.py` is the table of the functions.
"""

"""The lab's own performance figures. `bench` has the command `labkit bench`, and its docstring says how they are
measured; each other module can be used without it. No other package imports this one, except the command."""

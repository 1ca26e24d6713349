"""A file for each engine: its docstring is the specification of the fields and arrays that the engine sends."""

"""A file an engine. Its docstring is the specification of what the engine sends; the file ends with `register`."""

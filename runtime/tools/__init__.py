"""Tools of the runtime, one module each with `add_arguments(parser)` and `run(args) -> exit code`."""

"""One module per command of `codegen`, each with `run(...) -> exit code`, imported when it runs."""

"""Spec text in, the files of `generated/` out; one module per stage, named by its verb."""

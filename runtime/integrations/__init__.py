"""Bridges to other libraries: each module takes their objects and imports the library only when it runs."""

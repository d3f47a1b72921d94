"""`codegen schema`: the JSON Schema of a spec to stdout."""

from __future__ import annotations

import json


def run() -> int:
    """Print the schema, keys in a fixed order."""
    from poolwright.codegen.schema import json_schema

    print(json.dumps(json_schema(), indent=2, sort_keys=True))
    return 0

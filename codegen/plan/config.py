"""A model's config.json: a path in, typed fields out, each refused by name when it is missing or wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poolwright.codegen.names import shorten

MOST_BYTES = 4 << 20
MOST = 1 << 32
MOST_LAYERS = 4096


class PlanError(Exception):
    """A plan that cannot be made; str() is the whole message, one or more lines."""


@dataclass(frozen=True)
class Config:
    """The fields of a config, or of one table inside it (`at`: its name with a dot).

    `defaults` are the values that the model's own class gives to fields which published configs leave
    out. A field that is null counts as missing. Every method raises PlanError naming the field.
    """

    source: str
    values: Mapping[str, Any] = field(repr=False)
    model_type: str = ""
    at: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """The value as it stands, or the default, or None."""
        value = self.values.get(name)
        return self.defaults.get(name) if value is None else value

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def size(self, name: str, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self.get(name)
        if value is None:
            raise self.missing(name)
        return self._whole(name, value, least, MOST)

    def size_or(self, name: str, other: int, least: int = 1) -> int:
        """As `size`; `other` where the field is missing."""
        return self.size(name, least) if self.has(name) else other

    def layers(self) -> int:
        """How many layers the model has."""
        value = self.get("num_hidden_layers")
        if value is None:
            raise self.missing("num_hidden_layers")
        return self._whole("num_hidden_layers", value, 1, MOST_LAYERS)

    def flag(self, name: str) -> bool:
        """True or false; false where the field is missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, f"expected true or false, got {_show(value)}")
        return bool(value)

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, f"expected a text, got {_show(value)}")
        return value

    def words(self, name: str, known: Sequence[str]) -> tuple[str, ...] | None:
        """A list of words out of `known`, or None where the field is missing."""
        values = self._list(name)
        for value in values or ():
            if not isinstance(value, str) or value not in known:
                raise self.wrong(name, f"expected a list of {', '.join(known)}, got {_show(value)} in it")
        return None if values is None else tuple(values)

    def numbers(self, name: str, least: int = 0) -> tuple[int, ...] | None:
        """A list of whole numbers of at least `least`, or None where the field is missing."""
        values = self._list(name)
        return None if values is None else tuple(self._whole(name, value, least, MOST) for value in values)

    def table(self, name: str) -> Config | None:
        """A table inside this one, or None where the field is missing."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(name, f"expected a table, got {_show(value)}")
        return Config(self.source, value, self.model_type, f"{self.at}{name}.")

    def missing(self, *names: str) -> PlanError:
        """The error for a field that a config of this model type has to have; `names`: any one of them."""
        return self.wrong(
            names[0],
            f"missing{f', and so is {names[1]}' if names[1:] else ''}; the cache of model type "
            f"{shorten(self.model_type)} cannot be sized without it: add it, or take the config.json that "
            f"is published with the model",
        )

    def wrong(self, name: str, message: str) -> PlanError:
        return PlanError(f"{self.source}: {self.at}{name}: {message}")

    def _list(self, name: str) -> Sequence[Any] | None:
        value = self.get(name)
        if value is not None and not (isinstance(value, list) and len(value) <= MOST_LAYERS):
            raise self.wrong(name, f"expected a list of at most {MOST_LAYERS} entries, got {_show(value)}")
        return value

    def _whole(self, name: str, value: Any, least: int, most: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(name, f"expected a whole number from {least} to {most}, got {_show(value)}")
        return value


def read_config(path: Path) -> Config:
    """The config of a file. Raises PlanError for a file that holds none; OSError where it cannot be read."""
    with path.open("rb") as file:
        try:
            data = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise PlanError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise PlanError(f"{path}: larger than {MOST_BYTES:,} bytes; expected the config.json of a model")
    try:
        values = json.loads(data)
    except UnicodeDecodeError:
        raise PlanError(f"{path}: not UTF-8 text; expected the config.json of a model") from None
    except json.JSONDecodeError as error:
        raise PlanError(f"{path}:{error.lineno}:{error.colno}: no JSON: {error.msg}") from None
    except (RecursionError, ValueError):
        raise PlanError(f"{path}: nested too deep, or a number too long; expected a model's config") from None
    if not isinstance(values, dict):
        raise PlanError(f"{path}: expected a JSON object with a model's fields, got {_show(values)}")
    return Config(str(path), values)


def _show(value: Any) -> str:
    return shorten(value) if isinstance(value, str) else shorten(json.dumps(value)[:80]).strip("'")

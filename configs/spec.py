"""The base of every declaration: strict, frozen, with names that are safe in paths and registries."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError

from configs.errors import SpecError

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"
_NAME = re.compile(NAME_PATTERN)


class Spec(BaseModel):
    """A declaration: unknown keys are refused, values cannot be changed after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class ChoiceInForms:
    """Prefect's form offers `anyOf` as a choice, but shows `oneOf`, which a discriminator makes, as bare JSON."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = dict(handler(core_schema))
        schema["anyOf"] = schema.pop("oneOf")
        schema.pop("discriminator")
        return schema


def checked_name(value: str) -> str:
    """Return `value` if it can be part of a path, a partition id and a registry name.

    Raises:
        ValueError: if it holds anything but letters, digits, `_` and `-`, or is longer than 63.
    """
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"got {value!r}; possible: 1 to 63 letters, digits, '_' or '-', starting with a letter or digit; "
            "choose such a name (no path, no dot, no space)"
        )
    return value


Name = Annotated[str, AfterValidator(checked_name)]

S = TypeVar("S", bound=BaseModel)


def parse(cls: type[S], data: Any, *, where: str) -> S:
    """Validate `data` as `cls`; every fault is reported at once, each naming its field.

    Raises:
        SpecError: one line a fault, joined by `; `, prefixed by `where`.
    """
    if not isinstance(data, dict):
        raise SpecError(f"{where}: got {type(data).__name__}; possible: a mapping of {cls.__name__} fields; write one")
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise SpecError(f"{where}: " + "; ".join(_fault(cls, e) for e in error.errors())) from None


def _fault(cls: type[BaseModel], error: Any) -> str:
    field = _path(cls, error["loc"]) or cls.__name__
    if error["type"] in ("union_tag_not_found", "union_tag_invalid"):
        key = error["ctx"]["discriminator"].strip("'")
        given = f"got {error['ctx']['tag']!r}" if error["type"] == "union_tag_invalid" else "missing"
        tags = ", ".join(sorted(t for model in _models_at(cls, error["loc"]) for t in _tags(model)))
        return f"{field}.{key}: {given}; possible: {tags}; choose one"
    if error["type"] == "extra_forbidden":
        known = ", ".join(sorted(_fields_at(cls, error["loc"][:-1])))
        return f"{field}: unknown key; possible: {known}; remove it or correct its spelling"
    if error["type"] == "missing":
        return f"{field}: missing; it is required; add it"
    message = error["msg"].removeprefix("Value error, ")
    given = error.get("input")
    shown = "" if message.startswith("got ") or isinstance(given, dict) else f"got {given!r}; "
    return f"{field}: {shown}{message}"


def _fields_at(cls: type[BaseModel], loc: tuple[Any, ...]) -> list[str]:
    """Names of the fields of the model that `loc` leads to (through optionals, unions and tuples)."""
    return [name for model in _models_at(cls, loc) for name in model.model_fields]


def _models_at(cls: type[BaseModel], loc: tuple[Any, ...]) -> list[type[BaseModel]]:
    models: list[type[BaseModel]] = [cls]
    for part in loc:
        found: list[type[BaseModel]] = []
        for model in models:
            if isinstance(part, str) and part in model.model_fields:
                found += _models_in(model.model_fields[part].annotation)
            elif part in _tags(model):
                found.append(model)
        models = found or models  # an int index stays at the same models
    return models


def _path(cls: type[BaseModel], loc: tuple[Any, ...]) -> str:
    """`loc` as a person writes it: without the tags that pydantic puts where it has chosen one of a union."""
    kept = [
        part
        for i, part in enumerate(loc)
        if i == len(loc) - 1 or not any(part in _tags(model) for model in _models_at(cls, loc[:i]))
    ]
    return ".".join(str(part) for part in kept)


def _tags(model: type[BaseModel]) -> tuple[Any, ...]:
    """The values of the literal that tells a model of a union apart."""
    kind = model.model_fields.get("kind")
    return get_args(kind.annotation) if kind is not None else ()


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in getattr(annotation, "__args__", ()) for model in _models_in(arg)]

"""Errors of the OpenAI API, in the words its clients know (``code``, ``param``)."""

from modelswap_engine.protocol.errors import BadRequest, NotFound, Unavailable


class InvalidValue(BadRequest):
    """A field of the request has a value that cannot be used; ``param`` names it."""

    code = "invalid_value"

    @classmethod
    def of(cls, param: str, problem: str, *, advice: str = "") -> "InvalidValue":
        """Build the error for one field."""
        return cls(f"{param}: {problem}", advice=advice, details={"param": param})


class UnsupportedParameter(BadRequest):
    """A field asks for something this server does not do; it is refused rather than ignored."""

    code = "unsupported_parameter"

    @classmethod
    def of(cls, param: str, problem: str = "is not supported") -> "UnsupportedParameter":
        """Build the error for one field."""
        return cls(f"{param} {problem}", advice=f"leave {param} out", details={"param": param})


class ContextLengthExceeded(BadRequest):
    """Prompt and answer do not fit into the model's context."""

    code = "context_length_exceeded"


class ModelNotFound(NotFound):
    """The request names a model that is not served here."""

    code = "model_not_found"


class Overloaded(Unavailable):
    """As many requests as may be are inside."""

    code = "overloaded"


class Interrupted(Unavailable):
    """The engine ended this generation (worker lost, traffic mode Abort); the same request may succeed now."""

    code = "interrupted"

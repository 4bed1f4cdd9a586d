"""Structured logs of the engine's front: JSON in a cluster, readable lines on a terminal."""

import logging
import sys

import structlog

from modelswap_engine.protocol.telemetry import add_ids


def configure(*, json: bool) -> None:
    """Send structlog and the standard library's logging to standard error in one form."""
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        add_ids,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    tail: list[structlog.types.Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if json:
        tail += [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    else:
        tail += [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=tail))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    # The parser's complaints about malformed requests would let any client fill the log.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)

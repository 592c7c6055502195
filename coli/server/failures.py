"""What went wrong as a status and one message."""

from __future__ import annotations

from coli.errors import ChatTemplateError, ColiError, ContextLengthError, GrammarError, OptionError
from coli.server.guard import HttpError
from coli.server.requests import RefusedFieldError
from coli.server.worker import QueueFullError, ShuttingDownError


def http_error(error: Exception) -> HttpError:
    """The answer to `error`: ours are told as they are, of others only the type."""
    match error:
        case HttpError():
            return error
        case QueueFullError():
            message = "the queue is full, try again later"
            return HttpError(429, message, code="queue_full", retry_after=error.retry_after)
        case ShuttingDownError():
            return HttpError(503, "the server is shutting down", code="shutting_down", retry_after=5)
        case RefusedFieldError():
            return HttpError(400, f"{error.field}: {error}", error.field)
        case ContextLengthError():
            return HttpError(400, str(error), code="context_length_exceeded")
        case GrammarError():  # of a text that was read: it names tokens the model does not have
            return HttpError(400, str(error), "grammar")
        case ChatTemplateError():
            return HttpError(400, str(error), "messages")
        case OptionError():
            return HttpError(400, str(error))
        case ColiError():
            return HttpError(500, str(error))
    return HttpError(500, f"internal error: {type(error).__name__}")

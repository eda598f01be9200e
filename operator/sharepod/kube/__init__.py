"""Client of the API server, for operator and agent: connection, watch, and one error class for each kind of failure."""

from .connection import (
    APPLY_PATCH,
    JSON,
    JSON_PATCH,
    MERGE_PATCH,
    Connection,
    Json,
    TakeUnreadable,
    backoff,
)
from .credentials import NoApiServerError, configuration
from .errors import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    ErrorEventError,
    ForbiddenError,
    GoneError,
    InvalidError,
    NotFoundError,
    SilentError,
    UnauthorizedError,
    UnavailableError,
)
from .json_text import Unreadable
from .page_tokens import PageTokens

__all__ = [
    "APPLY_PATCH",
    "JSON",
    "JSON_PATCH",
    "MERGE_PATCH",
    "AlreadyExistsError",
    "ApiError",
    "ConflictError",
    "Connection",
    "ErrorEventError",
    "ForbiddenError",
    "GoneError",
    "InvalidError",
    "Json",
    "NoApiServerError",
    "NotFoundError",
    "PageTokens",
    "SilentError",
    "TakeUnreadable",
    "UnauthorizedError",
    "UnavailableError",
    "Unreadable",
    "backoff",
    "configuration",
]

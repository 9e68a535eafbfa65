"""What a failed request was: every failure of the client as a fault of a known kind. Pure."""

import contextlib
import json
from typing import Final

import httpx2
import openai

from kimigguf.probe.calls import Fault, FaultKind

_LONGEST_WAIT_SECONDS: Final = 60.0


class Cut(Exception):  # noqa: N818 -- caught in this room, like the client's own
    """A stream ended before it was done."""


class BudgetSpent(Exception):  # noqa: N818 -- as above
    """The budget forbids the request."""


FAILURES: Final = (openai.OpenAIError, httpx2.HTTPError, json.JSONDecodeError, Cut, BudgetSpent)


def fault_of(error: Exception, *, tries: int) -> Fault:
    status = error.status_code if isinstance(error, openai.APIStatusError) else None
    return Fault(kind=_kind(error, status), status=status, text=str(error)[:500], tries=tries)


def _kind(error: Exception, status: int | None) -> FaultKind:  # noqa: PLR0911 -- a table of errors
    match error:
        case BudgetSpent():
            return FaultKind.BUDGET
        case openai.APITimeoutError() | httpx2.TimeoutException():
            return FaultKind.TIMEOUT
        case openai.APIConnectionError() | httpx2.ConnectError():
            return FaultKind.CONNECTION
        case openai.AuthenticationError() | openai.PermissionDeniedError():
            return FaultKind.KEY
        case openai.RateLimitError():
            return FaultKind.RATE_LIMIT
        case openai.APIStatusError() if status is not None and status >= 500:  # noqa: PLR2004 -- HTTP's own line
            return FaultKind.SERVER
        case openai.APIStatusError():
            return FaultKind.REQUEST
        case openai.APIResponseValidationError():
            return FaultKind.NONSENSE
        case Cut() | httpx2.HTTPError() | openai.APIError():  # an APIError without a status comes within a stream
            return FaultKind.CUT_STREAM
    return FaultKind.NONSENSE


def wait_before(error: Exception, tried: int) -> float:
    """Seconds before the next try: what the endpoint asks for, else doubling from one."""
    asked = error.response.headers.get("retry-after") if isinstance(error, openai.APIStatusError) else None
    seconds = 2.0 ** (tried - 1)
    with contextlib.suppress(ValueError):  # no such header, or a date: rare enough to wait the usual time
        seconds = max(0.0, float(asked or ""))
    return min(_LONGEST_WAIT_SECONDS, seconds)

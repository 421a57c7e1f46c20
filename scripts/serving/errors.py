"""Errors in the form that OpenAI's clients read."""

# Status -> kind of error.
KINDS = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "server_error"}


class ApiError(Exception):
    """An error with a status, for the client.

    Args:
        code: a name for programs.
        parameter: the field of the body that is wrong.
    """

    def __init__(self, status: int, message: str, code: str | None = None, parameter: str | None = None):
        super().__init__(message)
        self.status, self.code, self.parameter = status, code, parameter

    def content(self) -> dict:
        """The body of the error."""
        return content(self.status, str(self), self.code, self.parameter)


def content(status: int, message: str, code: str | None = None, parameter: str | None = None) -> dict:
    """The body of an error."""
    kind = KINDS.get(status, "invalid_request_error")
    message = message.encode(errors="backslashreplace").decode()  # of a lone surrogate no response could be written
    return {"error": {"message": message, "type": kind, "param": parameter, "code": code}}

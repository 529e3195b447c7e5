# SPDX-License-Identifier: Apache-2.0
"""What goes wrong, as classes: one a code of the library, each a ValueError or a RuntimeError.

The message says what was given, what is legal and, where they are known, which rank and call it
was. It is the same as that of the C++ exception. An argument of a type that can't be meant, such as
a tensor that is none, raises TypeError before any rank is asked.
"""

from __future__ import annotations


class Error(Exception):
    """Every error of distmoe; `code` says which."""

    code: str = ""


class InvalidArgumentError(Error, ValueError):
    """An argument breaks the contract; nothing was written."""

    code = "invalid_argument"


class UnsupportedError(Error, NotImplementedError):
    """Legal, but this build or machine cannot do it."""

    code = "unsupported"


class CapacityExceededError(Error, RuntimeError):
    """Routing needs more rows than the memory plan has; every rank gets it."""

    code = "capacity_exceeded"


class OutOfMemoryError(Error, RuntimeError):
    """An allocation of the plan failed."""

    code = "out_of_memory"


class PeerMismatchError(Error, RuntimeError):
    """Ranks disagree about the configuration or about a call."""

    code = "peer_mismatch"


class PeerLostError(Error, RuntimeError):
    """A rank did not arrive within the timeout, left or died."""

    code = "peer_lost"


class ClosedError(Error, RuntimeError):
    """The context was closed, or an earlier fault left only close()."""

    code = "closed"


class DeviceFaultError(Error, RuntimeError):
    """The accelerator reported an error."""

    code = "device_fault"


class IoError(Error, RuntimeError):
    """A file could not be read, written or understood."""

    code = "io"


class InternalError(Error, RuntimeError):
    """A bug of distmoe, or of code that it was given to call."""

    code = "internal"


CLASS_OF_CODE: dict[str, type[Error]] = {
    error.code: error
    for error in (
        InvalidArgumentError,
        UnsupportedError,
        CapacityExceededError,
        OutOfMemoryError,
        PeerMismatchError,
        PeerLostError,
        ClosedError,
        DeviceFaultError,
        IoError,
        InternalError,
    )
}

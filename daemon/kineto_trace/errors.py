"""Errors between raw records and a finished trace.

TraceError                    every error of this package; has a reason_code for machines
├── SpoolError                SPOOL_INVALID          the target's folder is not as the daemon writes it (ours)
├── CodecError                CODEC_MISSING          the native library was not built or does not load (installation)
├── FormatError               FORMAT_UNKNOWN         an output format that does not exist (the caller's)
├── ViewError                 VIEW_UNKNOWN           a view, option or comparison that does not exist (the caller's)
├── QueryError                QUERY_INVALID          SQL that cannot be run (the caller's)
├── FileError                 FILE_INVALID           a file that is not a readable trace (the caller's)
├── DamagedError              FILE_DAMAGED           a file that is incomplete, or not the expected one
├── UnknownVersionError       CUPTI_UNKNOWN_VERSION  a CUPTI whose record layouts are not in our tables (the vendor's)
│   └── UnknownRocprofilerError  ROCPROFILER_UNKNOWN_VERSION  the same for rocprofiler-sdk
└── UnknownLayoutError        UNKNOWN_LAYOUT         records that do not have the layout of their version (the vendor's)
"""

from typing import ClassVar


class TraceError(Exception):
    """The base class. The text says what failed, for which object, and what to do."""

    reason_code: ClassVar[str] = "TRACE_FAILED"


class SpoolError(TraceError):
    """The raw folder of a target is incomplete, or damaged beyond what a crash explains."""

    reason_code = "SPOOL_INVALID"


class CodecError(TraceError):
    """The native trace codec cannot be loaded."""

    reason_code = "CODEC_MISSING"


class FormatError(TraceError):
    """This version does not write the requested output format."""

    reason_code = "FORMAT_UNKNOWN"


class ViewError(TraceError):
    """The view does not exist, or does not have the option."""

    reason_code = "VIEW_UNKNOWN"


class QueryError(TraceError):
    """The SQL is invalid, names something that does not exist, or fails while it runs."""

    reason_code = "QUERY_INVALID"


class FileError(TraceError):
    """The file cannot be read, or contains no trace of a known form."""

    reason_code = "FILE_INVALID"


class DamagedError(TraceError):
    """A file that must be complete is truncated, or is not the expected file."""

    reason_code = "FILE_DAMAGED"


class UnknownVersionError(TraceError):
    """The record layouts of the target's version of CUPTI are unknown."""

    reason_code = "CUPTI_UNKNOWN_VERSION"


class UnknownRocprofilerError(UnknownVersionError):
    """The records of the target's version of rocprofiler-sdk are unknown."""

    reason_code = "ROCPROFILER_UNKNOWN_VERSION"


class UnknownLayoutError(TraceError):
    """Raw records do not have the sizes that their version states; reading them would be guessing."""

    reason_code = "UNKNOWN_LAYOUT"

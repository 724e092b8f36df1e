"""What can go wrong between raw records and a finished trace.

TraceError                    every error of this package; has a reason_code for machines
├── SpoolError                SPOOL_INVALID          the target's folder is not what the daemon writes (ours)
├── CodecError                CODEC_MISSING          the native library was not built or does not load (installation)
├── FormatError               FORMAT_UNKNOWN         an output format that does not exist (the caller's)
├── ViewError                 VIEW_UNKNOWN           a view, option or comparison that does not exist (the caller's)
├── QueryError                QUERY_INVALID          SQL that cannot be run (the caller's)
├── FileError                 FILE_INVALID           a file that is no trace that can be read (the caller's)
├── UnknownVersionError       CUPTI_UNKNOWN_VERSION  a CUPTI whose record layouts are not in our tables (the vendor's)
└── UnknownLayoutError        UNKNOWN_LAYOUT         records that are not laid out as their version says (the vendor's)
"""

from typing import ClassVar


class TraceError(Exception):
    """A trace could not be made. The text says what, of which object, and what to do."""

    reason_code: ClassVar[str] = "TRACE_FAILED"


class SpoolError(TraceError):
    """The raw folder of a target is missing something or damaged beyond what a crash explains."""

    reason_code = "SPOOL_INVALID"


class CodecError(TraceError):
    """The native trace codec cannot be loaded."""

    reason_code = "CODEC_MISSING"


class FormatError(TraceError):
    """An output format that this version does not write."""

    reason_code = "FORMAT_UNKNOWN"


class ViewError(TraceError):
    """A view that does not exist, or an option that it does not have."""

    reason_code = "VIEW_UNKNOWN"


class QueryError(TraceError):
    """SQL that is wrong, names what does not exist, or fails while it runs."""

    reason_code = "QUERY_INVALID"


class FileError(TraceError):
    """A file that cannot be read, or holds no trace of a known form."""

    reason_code = "FILE_INVALID"


class UnknownVersionError(TraceError):
    """The target's CUPTI is of a version whose record layouts are unknown here."""

    reason_code = "CUPTI_UNKNOWN_VERSION"


class UnknownLayoutError(TraceError):
    """Raw records do not have the sizes that their version says; reading them would be guessing."""

    reason_code = "UNKNOWN_LAYOUT"

"""The error tree: everything a user can cause.

Each message is one line that names the file, tensor or field, what was expected, what was found and what to do.
`exit_code` is what the command line returns for it (1 failure, 2 usage or a refused setting or plan).
Raised anywhere below the command line; only `cli` turns one into a line on stderr.
"""


class ColiError(Exception):
    """Root of every error a user can cause."""

    exit_code = 1


class CheckpointError(ColiError):
    """A model file is missing, cut short, inconsistent or holds values that cannot be used."""


class TokenizerError(ColiError):
    """A tokenizer or chat template file cannot be used."""


class ChatTemplateError(TokenizerError):
    """A chat template cannot be compiled or fails; the message names file and line."""


class TemplateRefusedError(ChatTemplateError):
    """The template itself refuses the conversation (such as a system message); the message carries its reason."""

    exit_code = 2


class ReadError(ColiError):
    """A read failed or came back short after the file had been opened and checked."""


class WriteError(ColiError):
    """A file could not be written, or the disk is too small for it."""


class DownloadError(ColiError):
    """A file could not be fetched, or is not what it was said to be."""


class NumericError(ColiError):
    """A forward produced NaN, or a key or value does not fit its cache type."""


class OptionError(ColiError):
    """A setting has a value that is not allowed."""

    exit_code = 2


class NotConvertedError(OptionError):
    """The path holds a model, but not a coli container; the message carries the line to type."""


class UnsupportedModelError(ColiError):
    """A model type, rope type, data type or other property this version does not know."""

    exit_code = 2


class GrammarError(ColiError):
    """A grammar or schema cannot be parsed or evaluated."""

    exit_code = 2


class CorpusError(ColiError):
    """A draft corpus or graph is malformed or belongs to another model."""

    exit_code = 2


class MemoryBudgetError(ColiError):
    """A plan does not fit the memory budget; the message carries the arithmetic."""

    exit_code = 2


class ContextLengthError(ColiError):
    """Prompt and answer do not fit the context; the message names both numbers."""

    exit_code = 2

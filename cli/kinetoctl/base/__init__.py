"""What every command is built from: common options, click types, lazily imported commands and help sections."""

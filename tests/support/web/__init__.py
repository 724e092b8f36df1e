"""The web page, served and looked at by a test: by plain requests and by real browsers; traces that pages show."""

"""Text without its line breaks."""


def unwrapped(shown):
    """A result's text in one line, wherever it is wrapped."""
    return " ".join(str(shown).split())

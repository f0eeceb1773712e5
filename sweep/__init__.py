"""Single-machine training memory strategies: predicted, verified, measured and judged against a budget."""

__version__ = "0.1.0"

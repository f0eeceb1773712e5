"""Why was it rejected, how sure is it, would another budget change it? Codes and numbers; no torch, no sentences."""

from sweep.decide.budgets import Sensitivity as other_budgets
from sweep.decide.causes import explain
from sweep.decide.verdict import conclude

__all__ = ["conclude", "explain", "other_budgets"]

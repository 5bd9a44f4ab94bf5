"""From "it prints gibberish" to the cause: examine(path) -> Examination."""

from .examine import CannotRun, Examination, examine
from .findings import CODES, Finding
from .report import render

__all__ = ["CODES", "CannotRun", "Examination", "Finding", "examine", "render"]

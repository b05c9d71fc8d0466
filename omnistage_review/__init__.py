"""Reviews changes to PyTorch inference code: rules over the syntax tree of what changed, and a report.

Imports the standard library only: neither torch nor omnistage, so that it runs on any repository and starts at once.
"""

__version__ = "0.1.0"

"""The wire protocol between operator, command line and sidecar.

Everything that travels over the control port is declared here and nowhere else. The operator may import
this package and nothing more of the engine; this package imports nothing of ours, no torch and no network
library (import-linter keeps both).
"""

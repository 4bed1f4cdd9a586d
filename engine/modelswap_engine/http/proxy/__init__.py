"""The data port before an engine that has an API of its own: the only door to it, and a streaming one."""

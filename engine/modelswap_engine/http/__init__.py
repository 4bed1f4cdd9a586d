"""The two doors of a sidecar: the data port (OpenAI API) and the control port."""

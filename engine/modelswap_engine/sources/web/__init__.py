"""Reading files by ranges over HTTP: one transport for ``https://``, ``hf://`` and ``oci://``."""

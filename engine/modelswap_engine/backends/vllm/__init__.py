"""vLLM: our half in its workers (``extension``, ``host``, ``architectures``), its control side over HTTP (``control``).

The two meet nowhere: the one runs with vLLM's Python, the other in the sidecar, which has no torch.
"""

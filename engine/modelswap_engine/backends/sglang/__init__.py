"""SGLang: our half in its ranks (``plugin``, ``host``, ``architectures``), its control side over HTTP (``control``).

``plain`` exchanges weights by that control side alone. What runs in SGLang's process and what runs in the sidecar share
``words`` and nothing else.
"""
